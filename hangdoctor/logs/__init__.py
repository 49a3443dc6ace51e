"""From a server's log to what each rank has reached: follow, parse, timeline."""
