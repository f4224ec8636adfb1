/* Redis Streams: XADD appends, XREVRANGE of the last entry as the read beside them, XRANGE pages as catch-up. */
#define _GNU_SOURCE
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static char **ready;
static size_t *ready_length;

static int bulk(char *out, const char *bytes, size_t n) {
    int head = sprintf(out, "$%zu\r\n", n);
    memcpy(out + head, bytes, n);
    memcpy(out + head + n, "\r\n", 2);
    return head + (int)n + 2;
}

static void prepare(const struct options *o, int parts, const char *const part[], const size_t part_length[], int key_part) {
    ready = calloc((size_t)o->streams, sizeof *ready);
    ready_length = calloc((size_t)o->streams, sizeof *ready_length);
    for (int s = 0; s < o->streams; s++) {
        char key[256];
        fill_path(key, sizeof key, o->path, (uint64_t)s);
        char *out = ready[s] = malloc((size_t)o->body_bytes + 1024);
        int n = sprintf(out, "*%d\r\n", parts);
        for (int i = 0; i < parts; i++)
            n += i == key_part ? bulk(out + n, key, strlen(key)) : bulk(out + n, part[i], part_length[i]);
        ready_length[s] = (size_t)n;
    }
}

static void append_setup(const struct options *o) {
    size_t length;
    char *body = make_body(o, &length);
    const char *part[] = {"XADD", "", "*", "d", body};
    const size_t part_length[] = {4, 0, 1, 1, length};
    prepare(o, 5, part, part_length, 1);
}

static void read_setup(const struct options *o) {
    const char *part[] = {"XREVRANGE", "", "+", "-", "COUNT", "1"};
    const size_t part_length[] = {9, 0, 1, 1, 5, 1};
    prepare(o, 6, part, part_length, 1);
}

static void next(const struct options *o, struct connection *c) {
    uint64_t stream = c->turn % (uint64_t)o->streams;
    c->out = ready[stream];
    c->out_length = ready_length[stream];
}

/* Length of one whole value at `at`, or 0 if it is not all there. Arrays nest. */
size_t redis_value_length(const char *at, size_t n) {
    const char *end = memchr(at, '\n', n);
    if (!end) return 0;
    size_t line = (size_t)(end - at) + 1;
    long count = *at == '$' || *at == '*' ? atol(at + 1) : -1;
    if (*at == '$' && count >= 0) return n >= line + (size_t)count + 2 ? line + (size_t)count + 2 : 0;
    size_t used = line;
    for (long i = 0; *at == '*' && i < count; i++) {
        size_t part = used < n ? redis_value_length(at + used, n - used) : 0;
        if (part == 0) return 0;
        used += part;
    }
    return used;
}

static const char *reply_start; /* of the reply that feed() found whole */

static size_t feed(const struct options *o, struct connection *c, const char *bytes, size_t n, bool *done) {
    (void)o;
    const char *at = bytes;
    size_t length = n;
    if (c->carry_length > 0) {
        if (c->carry_length + n > CARRY_BYTES_MAX) die("reply over %d bytes", CARRY_BYTES_MAX);
        memcpy(c->carry + c->carry_length, bytes, n);
        at = c->carry;
        length = c->carry_length += n;
    }
    size_t used = redis_value_length(at, length);
    if (used == 0) {
        if (!c->carry) c->carry = malloc(CARRY_BYTES_MAX);
        if (c->carry_length == 0) memcpy(c->carry, bytes, n), c->carry_length = n;
        return n;
    }
    reply_start = at;
    c->status = *at == '-' ? 500 : 200;
    c->body_bytes = used;
    c->carry_length = 0;
    *done = true;
    return n - (length - used);
}

/* ---- catch-up: XRANGE pages of PAGE_ENTRIES, each after the last id of the one before ---- */
#define PAGE_ENTRIES 1000

static void page_next(const struct options *o, struct connection *c) {
    char key[256], from[OFFSET_BYTES_MAX + 1];
    fill_path(key, sizeof key, o->path, c->id % (uint64_t)o->streams);
    snprintf(from, sizeof from, "%s%s", c->offset[0] ? "(" : "-", c->offset);
    int n = sprintf(c->scratch, "*6\r\n");
    n += bulk(c->scratch + n, "XRANGE", 6);
    n += bulk(c->scratch + n, key, strlen(key));
    n += bulk(c->scratch + n, from, strlen(from));
    n += bulk(c->scratch + n, "+", 1);
    n += bulk(c->scratch + n, "COUNT", 5);
    n += sprintf(c->scratch + n, "$4\r\n%d\r\n", PAGE_ENTRIES);
    c->out = c->scratch;
    c->out_length = (size_t)n;
}

static size_t page_feed(const struct options *o, struct connection *c, const char *bytes, size_t n, bool *done) {
    size_t used = feed(o, c, bytes, n, done);
    if (!*done || c->status != 200) return used;
    long entries = atol(reply_start + 1);
    const char *last = NULL, *at = memchr(reply_start, '\n', c->body_bytes) + 1;
    for (long i = 0; i < entries; i++) last = at, at += redis_value_length(at, (size_t)(reply_start + c->body_bytes - at));
    c->body_bytes = (uint64_t)entries * (uint64_t)o->body_bytes; /* payload only, as with HTTP */
    c->offset[0] = 0;
    if (entries == PAGE_ENTRIES) sscanf(last, "*2\r\n$%*d\r\n%127[0-9-]", c->offset);
    return used;
}

const struct protocol protocol_redis = {append_setup, NULL, next, feed};
const struct protocol protocol_redis_read = {read_setup, NULL, next, feed};
const struct protocol protocol_redis_page = {NULL, NULL, page_next, page_feed};
