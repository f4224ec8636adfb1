/* load: a small load generator for durable stream servers. Prints JSON objects. See --help. */
#define _GNU_SOURCE
#include "load.h"

#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>

static const char usage[] =
    "load --mode MODE --port N [options]   (prints one JSON object, or with --every one a line; latencies in microseconds)\n"
    "modes: append      closed-loop HTTP requests (POST by default; --method GET|PUT for others)\n"
    "       read        catch-up reads that follow Stream-Next-Offset to the tail, then start again\n"
    "       redis       XADD;  redis-read: XREVRANGE ... COUNT 1;  redis-page: XRANGE pages to the tail\n"
    "       nats        JetStream publish, waiting for each acknowledgement\n"
    "       fanout      --readers SSE readers of one stream, one writer at --rate messages/s\n"
    "       follow      --readers SSE readers that come back until the stream is closed, at most --seconds\n"
    "  --host A          IPv4 address (127.0.0.1)      --port N\n"
    "  --path T          path, key or subject; %d becomes the stream number (with --unique the request number)\n"
    "  --method M        HTTP method (POST)            --content-type T   (application/octet-stream)\n"
    "  --header 'A: b'   one more header, repeatable   --body-bytes N     size of a message (100)\n"
    "  --array N         body is a JSON array of N messages\n"
    "  --connections N   (64)                          --streams N        (1)\n"
    "  --seconds S       measured time (5)             --warmup S         before it (1)\n"
    "  --count N         stop after N replies instead  --create           create the streams first\n"
    "  --every S         print an object each S seconds, of what came in these (not for --count or follow)\n"
    "  --unique          a new path for each request   --discard          read: let the kernel drop body bytes\n"
    "  --scatter         append: one of the --streams at random for each request, instead of one after the other\n"
    "  --rate N          requests/s of all connections, latency from when each was due (0: closed loop; fanout: 100)\n"
    "  --readers N (1000)  --drain S (5)                                  for fanout\n";

enum { OPT_HOST = 256, OPT_PORT, OPT_PATH, OPT_METHOD, OPT_TYPE, OPT_HEADER, OPT_BODY, OPT_ARRAY, OPT_CONNECTIONS, OPT_STREAMS,
       OPT_SECONDS, OPT_WARMUP, OPT_EVERY, OPT_COUNT, OPT_CREATE, OPT_UNIQUE, OPT_SCATTER, OPT_DISCARD, OPT_READERS, OPT_RATE, OPT_DRAIN, OPT_MODE, OPT_HELP };

static const struct option names[] = {
    {"mode", 1, 0, OPT_MODE}, {"host", 1, 0, OPT_HOST}, {"port", 1, 0, OPT_PORT}, {"path", 1, 0, OPT_PATH},
    {"method", 1, 0, OPT_METHOD}, {"content-type", 1, 0, OPT_TYPE}, {"header", 1, 0, OPT_HEADER},
    {"body-bytes", 1, 0, OPT_BODY}, {"array", 1, 0, OPT_ARRAY}, {"connections", 1, 0, OPT_CONNECTIONS},
    {"streams", 1, 0, OPT_STREAMS}, {"seconds", 1, 0, OPT_SECONDS}, {"warmup", 1, 0, OPT_WARMUP}, {"every", 1, 0, OPT_EVERY},
    {"count", 1, 0, OPT_COUNT}, {"create", 0, 0, OPT_CREATE}, {"unique", 0, 0, OPT_UNIQUE}, {"scatter", 0, 0, OPT_SCATTER},
    {"discard", 0, 0, OPT_DISCARD}, {"readers", 1, 0, OPT_READERS}, {"rate", 1, 0, OPT_RATE},
    {"drain", 1, 0, OPT_DRAIN}, {"help", 0, 0, OPT_HELP}, {0, 0, 0, 0}};

static void take(struct options *o, int which, const char *value) {
    switch (which) {
    case OPT_MODE: o->mode = value; break;
    case OPT_HOST: o->host = value; break;
    case OPT_PORT: o->port = atoi(value); break;
    case OPT_PATH: o->path = value; break;
    case OPT_METHOD: o->method = value; break;
    case OPT_TYPE: o->content_type = value; break;
    case OPT_HEADER:
        if (o->header_count == HEADERS_MAX) die("at most %d headers", HEADERS_MAX);
        o->header[o->header_count++] = value;
        break;
    case OPT_BODY: o->body_bytes = atoi(value); break;
    case OPT_ARRAY: o->array = atoi(value); break;
    case OPT_CONNECTIONS: o->connections = atoi(value); break;
    case OPT_STREAMS: o->streams = atoi(value); break;
    case OPT_SECONDS: o->seconds = atof(value); break;
    case OPT_WARMUP: o->warmup_seconds = atof(value); break;
    case OPT_EVERY: o->every_seconds = atof(value); break;
    case OPT_COUNT: o->count = strtoull(value, NULL, 10); break;
    case OPT_CREATE: o->create = true; break;
    case OPT_UNIQUE: o->unique = true; break;
    case OPT_SCATTER: o->scatter = true; break;
    case OPT_DISCARD: o->discard = true; break;
    case OPT_READERS: o->readers = atoi(value); break;
    case OPT_RATE: o->rate_per_s = atoi(value); break;
    case OPT_DRAIN: o->drain_seconds = atof(value); break;
    case OPT_HELP: fputs(usage, stdout); exit(0);
    default: fputs(usage, stderr); exit(2);
    }
}

static const struct protocol *protocol_of(const char *mode) {
    if (strcmp(mode, "append") == 0) return &protocol_append;
    if (strcmp(mode, "read") == 0) return &protocol_read;
    if (strcmp(mode, "redis") == 0) return &protocol_redis;
    if (strcmp(mode, "redis-read") == 0) return &protocol_redis_read;
    if (strcmp(mode, "redis-page") == 0) return &protocol_redis_page;
    if (strcmp(mode, "nats") == 0) return &protocol_nats;
    die("unknown mode %s", mode);
}

int main(int argc, char **argv) {
    struct options o = {.mode = "append", .host = "127.0.0.1", .method = "POST", .path = "/v1/stream/bench-%d",
                        .content_type = "application/octet-stream", .connections = 64, .streams = 1, .body_bytes = 100,
                        .seconds = 5, .warmup_seconds = 1, .readers = 1000, .drain_seconds = 5};
    for (int c; (c = getopt_long(argc, argv, "", names, NULL)) != -1;) take(&o, c, optarg);
    if (o.port <= 0 || o.connections < 1 || o.streams < 1 || o.body_bytes < 1) die("see --help");
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    bool fanout = strcmp(o.mode, "fanout") == 0;
    if (fanout && o.rate_per_s == 0) o.rate_per_s = 100;
    if (fanout) run_fanout(&o);
    else if (strcmp(o.mode, "follow") == 0) run_follow(&o);
    else run_closed_loop(&o, protocol_of(o.mode));
    return 0;
}
