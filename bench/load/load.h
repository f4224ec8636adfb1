/* Shared parts of the load generator: options, histogram, HTTP reply parser, connection engine. */
#ifndef TAILRACE_BENCH_LOAD_H
#define TAILRACE_BENCH_LOAD_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#define HEADERS_MAX 16
#define RECV_BUFFER_BYTES (256 * 1024)
#define HEAD_BYTES_MAX 16384
#define OFFSET_BYTES_MAX 128

/* ---- histogram: log-linear, under 1 % error, nanoseconds ---- */
#define HIST_SUB_BITS 7
#define HIST_SLOTS ((64 - HIST_SUB_BITS) << HIST_SUB_BITS)
struct hist {
    uint64_t slot[HIST_SLOTS];
    uint64_t count, max_ns;
    double sum_ns;
};
void hist_add(struct hist *h, uint64_t value_ns);
uint64_t hist_quantile(const struct hist *h, double q);
void hist_print(const struct hist *h, const char *name); /* "name":{"mean":..,"p50":..} in microseconds */

uint64_t now_ns(void);
double cpu_seconds(void);
_Noreturn void die(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* ---- options ---- */
struct options {
    const char *mode;
    const char *host;
    int port;
    const char *method;
    const char *path; /* %d is replaced by the stream number, or by the request number with --unique */
    const char *content_type;
    const char *header[HEADERS_MAX];
    int header_count;
    int connections;
    int streams;
    int body_bytes;
    int array; /* > 0: the body is a JSON array of this many messages of body_bytes each */
    double seconds;
    double warmup_seconds;
    double every_seconds; /* > 0: report, and count anew, each time this has passed */
    uint64_t count; /* > 0: stop after this many replies instead of after `seconds` */
    bool create;    /* PUT (or the like) each stream first */
    bool unique, scatter;
    bool discard; /* read: drop body bytes in the kernel instead of copying them out */
    int readers;  /* fanout */
    int rate_per_s; /* requests of all connections together; 0: as fast as they are answered */
    double drain_seconds;
};

/* ---- sockets ---- */
int connect_to(const struct options *o);
void set_nonblocking(int fd, bool on);
void send_all(int fd, const char *bytes, size_t n);

/* ---- HTTP/1.1 replies, parsed as the bytes come ---- */
enum reply_state { REPLY_HEAD, REPLY_LENGTH, REPLY_CHUNK_SIZE, REPLY_CHUNK_DATA, REPLY_CHUNK_END, REPLY_TRAILER };
typedef void (*body_sink)(void *owner, const char *bytes, size_t n);
struct reply {
    enum reply_state state;
    int status;
    bool chunked, up_to_date;
    uint64_t remaining; /* of the body, or of the chunk */
    uint64_t body_bytes;
    char next_offset[OFFSET_BYTES_MAX];
    char head[HEAD_BYTES_MAX]; /* used only when a head arrives in pieces */
    size_t head_length;
    body_sink sink; /* may be NULL: bytes are only counted */
    void *owner;
};
void reply_reset(struct reply *r);
/* Returns the bytes used; *done is set when one whole reply has been seen. */
size_t reply_feed(struct reply *r, const char *bytes, size_t n, bool *done);
int http_request(char *out, size_t room, const struct options *o, const char *method, const char *path,
                 const char *body, size_t body_length);
void fill_path(char *out, size_t room, const char *template, uint64_t number);
char *make_body(const struct options *o, size_t *length);
void http_create_streams(const struct options *o);

/* ---- closed-loop engine ---- */
struct connection {
    int fd;
    uint32_t id;
    uint64_t turn; /* number of its request, counted over all connections: streams are taken in turn */
    uint64_t sent_ns;
    uint64_t due_ns; /* with a rate: when its next request is to be sent */
    bool waiting;
    const char *out;
    size_t out_length, out_sent;
    char *scratch; /* for requests built one by one */
    struct reply reply;
    char offset[OFFSET_BYTES_MAX];
    int status;          /* of the finished reply */
    uint64_t body_bytes; /* of the finished reply */
    char *carry;         /* line protocols: bytes of an unfinished reply */
    size_t carry_length;
};
struct protocol {
    void (*setup)(const struct options *o);                          /* once, before any connection; may be NULL */
    void (*opened)(const struct options *o, struct connection *c);   /* blocking handshake; may be NULL */
    void (*next)(const struct options *o, struct connection *c);     /* set out and out_length */
    size_t (*feed)(const struct options *o, struct connection *c, const char *bytes, size_t n, bool *done);
};
#define CARRY_BYTES_MAX (4 * 1024 * 1024)
#define SCRATCH_BYTES (64 * 1024)
extern const struct protocol protocol_append, protocol_read, protocol_redis, protocol_redis_read, protocol_redis_page, protocol_nats;
void run_closed_loop(const struct options *o, const struct protocol *p);
void run_fanout(const struct options *o);
void run_follow(const struct options *o);

#endif
