/* A libnvidia-ml.so.1 for tests: what it says stands in the file NVML_STUB, read at each call.
 *
 * One card a line: utilisation, memory utilisation, MiB used, milliwatts, error number or 0,
 * milliseconds to wait before each answer, PID of a process with all of the memory or 0.
 * Without the file it says that the driver is not loaded.
 */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

enum { SUCCESS = 0, INVALID = 2, NO_SPACE = 7, NO_DRIVER = 9, MOST = 16 };

struct card { unsigned busy, memory_busy, used_mib, milliwatts; int error; unsigned wait_ms, pid; };
struct process { unsigned pid; unsigned long long bytes; unsigned gpu_instance, compute_instance; };

static struct card cards[MOST];
static char handles[MOST];

static int load(void) {
    const char *path = getenv("NVML_STUB");
    FILE *file = path ? fopen(path, "r") : NULL;
    int count = 0;
    if (!file) return -1;
    while (count < MOST) {
        struct card *c = &cards[count];
        if (fscanf(file, "%u %u %u %u %d %u %u", &c->busy, &c->memory_busy, &c->used_mib,
                   &c->milliwatts, &c->error, &c->wait_ms, &c->pid) != 7) break;
        count++;
    }
    fclose(file);
    return count;
}

static struct card *find(void *handle, int *result) {
    long index = (char *)handle - handles;
    *result = INVALID;
    if (index < 0 || index >= load()) return NULL;
    struct card *c = &cards[index];
    struct timespec wait = { c->wait_ms / 1000, (c->wait_ms % 1000) * 1000000L };
    nanosleep(&wait, NULL);
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
int nvmlDeviceGetName(void *device, char *text, unsigned size) {
    CARD snprintf(text, size, "NVIDIA Stub");
    return SUCCESS;
}
int nvmlDeviceGetUtilizationRates(void *device, unsigned *rates) {
    CARD rates[0] = c->busy; rates[1] = c->memory_busy;
    return SUCCESS;
}
int nvmlDeviceGetMemoryInfo(void *device, unsigned long long *info) {
    CARD info[0] = 1000ULL << 20; info[2] = (unsigned long long)c->used_mib << 20;
    info[1] = info[0] - info[2];
    return SUCCESS;
}
int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    CARD *milliwatts = c->milliwatts;
    return SUCCESS;
}
int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *list) {
    CARD unsigned room = *count;
    *count = c->pid ? 1 : 0;
    if (!c->pid) return SUCCESS;
    if (!list || !room) return NO_SPACE;
    memset(list, 0, sizeof *list);
    list->pid = c->pid; list->bytes = (unsigned long long)c->used_mib << 20;
    return SUCCESS;
}
