/* A libnvidia-ml.so.1 for tests: what it says stands in the file NVML_STUB, read at each call.
 *
 * One card a line, as key=value: busy, memory_busy, used and total (MiB), milliwatts, limit
 * (milliwatts), error (number that each call on the card returns), wait (milliseconds before each
 * answer), reasons (mask of clock event reasons), received and sent (PCIe bytes; without them the
 * counters are not supported), linked (KiB over NVLink, each way), throughput (KiB a second),
 * ecc (uncorrected errors), xid (told once), mig, virtual (virtualisation mode), blind (no
 * utilisation, as with MIG), pid=PID:MiB (several times), draws=PID:MiB (one that only draws).
 * Without the file it says that the driver
 * is not loaded. -DOLD leaves out what older drivers lack. -DREAL makes each call take what it takes
 * on an H200 (driver 580.159), and reads the file once, so that it can be measured by.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID = 2, UNSUPPORTED = 3, NO_PERMISSION = 4, NO_SPACE = 7, NO_DRIVER = 9,
       TIMEOUT = 10, MOST = 16, MOST_PIDS = 4 };

struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };
struct card {
    long busy, memory_busy, used, total, milliwatts, limit, error, wait, reasons, received, sent,
         linked, throughput, ecc, xid, mig, virtual_, blind, sealed;
    int count, drawing;
    struct process processes[MOST_PIDS], draws[1];
};
struct value { unsigned id, scope; long long time, latency; unsigned type; int result;
               unsigned long long number; };

static struct card cards[MOST];
static char handles[MOST];
static long told[MOST];

static void set(struct card *c, const char *key, const char *value) {
    static const struct { const char *name; size_t at; } keys[] = {
#define KEY(field) { #field, __builtin_offsetof(struct card, field) }
        KEY(busy), KEY(memory_busy), KEY(used), KEY(total), KEY(milliwatts), KEY(limit),
        KEY(error), KEY(wait), KEY(reasons), KEY(received), KEY(sent), KEY(linked),
        KEY(throughput), KEY(ecc), KEY(xid), KEY(mig), KEY(blind), KEY(sealed),
        { "virtual", __builtin_offsetof(struct card, virtual_) },
    };
    int draws = !strcmp(key, "draws") && !c->drawing;
    if (draws || (!strcmp(key, "pid") && c->count < MOST_PIDS)) {
        struct process *p = draws ? &c->draws[c->drawing++] : &c->processes[c->count++];
        unsigned mib = 0;
        sscanf(value, "%u:%u", &p->pid, &mib);
        p->bytes = (unsigned long long)mib << 20;
        p->gpu_instance = p->compute_instance = 0xffffffff;
    }
    for (size_t i = 0; i < sizeof keys / sizeof *keys; i++)
        if (!strcmp(key, keys[i].name)) *(long *)((char *)c + keys[i].at) = atol(value);
}

static void take_us(long us) {
#ifdef REAL
    struct timespec now, begin;
    clock_gettime(CLOCK_MONOTONIC, &begin);
    do clock_gettime(CLOCK_MONOTONIC, &now);
    while ((now.tv_sec - begin.tv_sec) * 1000000L + (now.tv_nsec - begin.tv_nsec) / 1000 < us);
#else
    (void)us;
#endif
}

static int load(void) {
#ifdef REAL
    static int known = 0;
    if (known) return known;
#endif
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    char line[512];
    int count = 0;
    if (!file) return -1;
    while (count < MOST && fgets(line, sizeof line, file)) {
        struct card *c = &cards[count++];
        memset(c, 0, sizeof *c);
        c->total = 97887;
        c->received = c->sent = c->linked = c->throughput = -1;
        for (char *word = strtok(line, " \n"); word; word = strtok(NULL, " \n")) {
            char *value = strchr(word, '=');
            if (value) { *value = 0; set(c, word, value + 1); }
        }
    }
    fclose(file);
#ifdef REAL
    known = count;
#endif
    return count;
}

static struct card *find(void *handle, int *result) {
    long index = (char *)handle - handles;
    *result = INVALID;
    if (index < 0 || index >= load()) return NULL;
    struct card *c = &cards[index];
    struct timespec wait = { c->wait / 1000, (c->wait % 1000) * 1000000L };
    if (c->wait) nanosleep(&wait, NULL);
    take_us(5);
    *result = c->error;
    return c->error ? NULL : c;
}

#define CARD int result; struct card *c = find(device, &result); if (!c) return result;

int nvmlInitWithFlags(unsigned flags) { (void)flags; return load() < 0 ? NO_DRIVER : SUCCESS; }
int nvmlInit_v2(void) { return nvmlInitWithFlags(0); }
int nvmlShutdown(void) { return SUCCESS; }
const char *nvmlErrorString(int code) { return code == 15 ? "GPU is lost" : "error of the stub"; }
int nvmlSystemGetDriverVersion(char *text, unsigned size) {
    snprintf(text, size, "575.0.stub");
    return SUCCESS;
}
int nvmlDeviceGetCount_v2(unsigned *count) { *count = load(); return SUCCESS; }
int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    *device = &handles[index];
    return SUCCESS;
}
int nvmlDeviceGetIndex(void *device, unsigned *index) {
    *index = (char *)device - handles;
    return SUCCESS;
}
int nvmlDeviceGetMinorNumber(void *device, unsigned *minor) {
    CARD *minor = (char *)device - handles;
    return SUCCESS;
}
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    CARD snprintf(text, size, "NVIDIA RTX PRO 6000 Blackwell Server Edition");
    return SUCCESS;
}
int nvmlDeviceGetPciInfo_v3(void *device, char *info) { /* nvmlPciInfo_t: the last 32 bytes */
    CARD snprintf(info + 36, 32, "00000000:%02lX:00.0", (long)((char *)device - handles) + 0x10);
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    CARD if (c->blind) return UNSUPPORTED;
    rates[0] = c->busy; rates[1] = c->memory_busy;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *info) {
    CARD info[0] = (unsigned long long)c->total << 20;
    info[2] = (unsigned long long)c->used << 20;
    info[1] = info[0] - info[2];
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    CARD *milliwatts = c->milliwatts;
    return SUCCESS;
}
int nvmlDeviceGetEnforcedPowerLimit(void *device, unsigned *milliwatts) {
    CARD if (!c->limit) return UNSUPPORTED;
    *milliwatts = c->limit;
    return SUCCESS;
}
static int give(const struct process *all, int known, unsigned *count, struct process *list) {
    unsigned room = *count;
    *count = known;
    if (!known) return SUCCESS;
    if (!list || room < (unsigned)known) return NO_SPACE;
    memcpy(list, all, known * sizeof *list);
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *list) {
    CARD if (c->sealed) return NO_PERMISSION;
    return give(c->processes, c->count, count, list);
}
#ifndef OLD
int nvmlDeviceGetGraphicsRunningProcesses_v3(void *device, unsigned *count, struct process *list) {
    CARD return give(c->draws, c->drawing, count, list);
}
int nvmlDeviceGetCurrentClocksThrottleReasons(void *device, unsigned long long *reasons) {
    CARD *reasons = c->reasons;
    return SUCCESS;
}
int nvmlDeviceGetTemperature(void *device, unsigned sensor, unsigned *degrees) {
    CARD *degrees = 35; (void)sensor;
    return SUCCESS;
}
int nvmlDeviceGetTotalEccErrors(void *device, unsigned kind, unsigned counter,
                                unsigned long long *errors) {
    CARD *errors = c->ecc; (void)kind; (void)counter;
    return SUCCESS;
}
int nvmlDeviceGetMigMode(void *device, unsigned *now, unsigned *next) {
    CARD take_us(145);
    *now = *next = c->mig;
    return SUCCESS;
}
int nvmlDeviceGetVirtualizationMode(void *device, unsigned *mode) {
    CARD *mode = c->virtual_;
    return SUCCESS;
}
int nvmlDeviceGetPcieThroughput(void *device, unsigned counter, unsigned *rate) {
    CARD take_us(21000);
    if (c->throughput < 0) return UNSUPPORTED;
    *rate = c->throughput; (void)counter;
    return SUCCESS;
}
int nvmlDeviceGetFieldValues(void *device, int count, struct value *values) {
    CARD for (int i = 0; i < count; i++) {
        if (values[i].id >= 197) take_us(150);
        long number = values[i].id == 198 ? c->received : values[i].id == 197 ? c->sent : c->linked;
        values[i].result = number < 0 ? UNSUPPORTED : SUCCESS;
        values[i].type = values[i].id >= 197 ? 1 : 3; /* unsigned int, unsigned long long */
        values[i].number = values[i].type == 1 ? (unsigned)number : number;
    }
    return SUCCESS;
}
int nvmlEventSetCreate(void **set_) { *set_ = told; return SUCCESS; }
int nvmlDeviceRegisterEvents(void *device, unsigned long long kinds, void *set_) {
    CARD (void)kinds; (void)set_;
    return SUCCESS;
}
int nvmlEventSetWait_v2(void *set_, void *data, unsigned wait_ms) {
    struct { void *device; unsigned long long kind, number; unsigned one, other; } *event = data;
    int count = load();
    (void)set_; (void)wait_ms;
    for (int i = 0; i < count; i++)
        if (cards[i].xid && told[i] != cards[i].xid) {
            told[i] = cards[i].xid;
            event->device = &handles[i]; event->kind = 8; event->number = cards[i].xid;
            return SUCCESS;
        }
    return TIMEOUT;
}
#endif
