/* The load client of the hub benches: actors in pairs, one to many, senders that wait, and those that only sit. */
#ifndef TAILRACE_BENCH_HUB_H
#define TAILRACE_BENCH_HUB_H

#include "../load/load.h"

enum role { SENDER, RECEIVER, RESTING };
enum heard { NOTHING, DELIVERY, ACCEPTED, REFUSED };

struct plan {
    struct options to;    /* host and port */
    const char *scenario; /* relay, broadcast, publish, durable, idle */
    const char *path;     /* of the WebSocket */
    int clients;          /* pairs, receivers, senders or connections, as the scenario has it */
    int window;           /* messages on their way: of each pair, or of the one sender */
    int bytes;            /* of a whole envelope; of the payload where there is none */
    double seconds, warmup_seconds;
    double rate_per_s; /* > 0: messages are due at fixed times, whatever came of those before */
    bool registers;    /* idle: every connection takes an address too */
};

struct client {
    int fd;
    uint32_t number;
    enum role role;
    uint64_t sent_ns; /* durable: of the message that is not accepted yet */
    char *in;
    size_t in_length, in_room;
    char *out;
    size_t out_length, out_sent, out_room;
};

struct wire {
    /* Everything before the first message, with a blocking socket. */
    void (*open)(const struct plan *p, struct client *c);
    /* One message for a receiver into `out`; it carries the time it was due. */
    void (*send)(const struct plan *p, struct client *c, uint32_t target, uint64_t due_ns);
    /* One whole frame at the start of some bytes: its length, or 0 if there is more to come. */
    size_t (*take)(struct client *c, char *bytes, size_t n, enum heard *heard, uint64_t *due_ns);
};
size_t redis_value_length(const char *at, size_t n); /* load/redis.c: of one whole value, or 0 */
extern const struct wire wire_hub, wire_nats, wire_redis, wire_mqtt;

/* Room for so many bytes more at the end of `out`. */
char *out_room(struct client *c, size_t n);
void out_flush(struct client *c);
/* Blocking: frames are read until one holds this text. */
void wait_for(const struct wire *w, struct client *c, const char *text);
/* `{"t":"<20 digits>","p":"xxx"}` of exactly so many bytes; the time can be read back from wherever it turns up. */
size_t put_data(char *out, size_t bytes, uint64_t due_ns);
bool find_time(const char *bytes, size_t n, uint64_t *due_ns);

#define DATA_BYTES_MIN 40

#endif
