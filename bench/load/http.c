/* HTTP/1.1: requests, an incremental reply parser, and the append and catch-up read protocols. */
#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>
#include <sys/socket.h>
#include <unistd.h>

void reply_reset(struct reply *r) {
    r->state = REPLY_HEAD;
    r->status = 0;
    r->chunked = r->up_to_date = false;
    r->remaining = r->body_bytes = 0;
    r->next_offset[0] = 0;
    r->head_length = 0;
}

static bool header_is(const char *line, size_t n, const char *name, size_t name_length) {
    return n > name_length && line[name_length] == ':' && strncasecmp(line, name, name_length) == 0;
}
#define HEADER_IS(line, n, name) header_is(line, n, name, sizeof(name) - 1)

static void header_value(const char *line, size_t n, size_t skip, char *out, size_t room) {
    while (skip < n && line[skip] == ' ') skip++;
    size_t length = n - skip < room - 1 ? n - skip : room - 1;
    memcpy(out, line + skip, length);
    out[length] = 0;
}

/* head: from the status line to before the blank line, each line ending in CRLF */
static void parse_head(struct reply *r, const char *head, size_t n) {
    char value[OFFSET_BYTES_MAX];
    uint64_t length = 0;
    r->status = n > 12 ? atoi(head + 9) : 0;
    const char *line = memchr(head, '\n', n), *end = head + n;
    for (line = line ? line + 1 : end; line < end;) {
        const char *stop = memchr(line, '\r', (size_t)(end - line));
        if (!stop) stop = end;
        size_t m = (size_t)(stop - line);
        switch (*line | 0x20) {
        case 'c':
            if (HEADER_IS(line, m, "content-length")) {
                header_value(line, m, 15, value, sizeof value);
                length = strtoull(value, NULL, 10);
            }
            break;
        case 't':
            if (HEADER_IS(line, m, "transfer-encoding")) {
                header_value(line, m, 18, value, sizeof value);
                r->chunked = strcasestr(value, "chunked") != NULL;
            }
            break;
        case 's':
            if (HEADER_IS(line, m, "stream-next-offset")) header_value(line, m, 19, r->next_offset, OFFSET_BYTES_MAX);
            else if (HEADER_IS(line, m, "stream-up-to-date")) r->up_to_date = true;
            break;
        }
        line = stop + 2;
    }
    bool bodiless = r->status == 204 || r->status == 304 || (r->status >= 100 && r->status < 200);
    r->remaining = length;
    if (bodiless) r->remaining = 0, r->chunked = false;
    r->state = r->chunked ? REPLY_CHUNK_SIZE : REPLY_LENGTH;
    r->head_length = 0;
}

static size_t feed_head(struct reply *r, const char *bytes, size_t n) {
    if (r->head_length == 0) {
        const char *blank = memmem(bytes, n, "\r\n\r\n", 4);
        if (blank) {
            parse_head(r, bytes, (size_t)(blank + 2 - bytes));
            return (size_t)(blank + 4 - bytes);
        }
    }
    size_t before = r->head_length, room = HEAD_BYTES_MAX - before;
    size_t take = n < room ? n : room;
    memcpy(r->head + before, bytes, take);
    const char *blank = memmem(r->head, before + take, "\r\n\r\n", 4);
    if (!blank) {
        if (take < n) die("reply head over %d bytes", HEAD_BYTES_MAX);
        r->head_length = before + take;
        return take;
    }
    size_t whole = (size_t)(blank + 4 - r->head);
    parse_head(r, r->head, whole - 2);
    return whole - before;
}

static size_t feed_body(struct reply *r, const char *bytes, size_t n) {
    size_t take = n < r->remaining ? n : (size_t)r->remaining;
    if (r->sink && take) r->sink(r->owner, bytes, take);
    r->remaining -= take;
    r->body_bytes += take;
    return take;
}

static int hex_digit(char c) {
    if (c >= '0' && c <= '9') return c - '0';
    c |= 0x20;
    return c >= 'a' && c <= 'f' ? c - 'a' + 10 : -1;
}

size_t reply_feed(struct reply *r, const char *bytes, size_t n, bool *done) {
    size_t at = 0;
    *done = false;
    for (;;) {
        if (r->state == REPLY_LENGTH && r->remaining == 0) {
            *done = true;
            return at;
        }
        if (at == n) return at;
        switch (r->state) {
        case REPLY_HEAD:
            at += feed_head(r, bytes + at, n - at);
            break;
        case REPLY_LENGTH:
            at += feed_body(r, bytes + at, n - at);
            break;
        case REPLY_CHUNK_SIZE: /* digits, then anything up to LF */
            if (bytes[at] == '\n') r->state = r->remaining ? REPLY_CHUNK_DATA : REPLY_TRAILER;
            else if (hex_digit(bytes[at]) >= 0) r->remaining = r->remaining * 16 + (uint64_t)hex_digit(bytes[at]);
            at++;
            break;
        case REPLY_CHUNK_DATA:
            at += feed_body(r, bytes + at, n - at);
            if (r->remaining == 0) r->state = REPLY_CHUNK_END;
            break;
        case REPLY_CHUNK_END:
            if (bytes[at++] == '\n') r->state = REPLY_CHUNK_SIZE;
            break;
        case REPLY_TRAILER: /* no peer sends trailers: the next LF ends the reply */
            if (bytes[at++] == '\n') r->state = REPLY_LENGTH;
            break;
        }
    }
}

void fill_path(char *out, size_t room, const char *template, uint64_t number) {
    const char *mark = strstr(template, "%d");
    if (!mark) snprintf(out, room, "%s", template);
    else snprintf(out, room, "%.*s%llu%s", (int)(mark - template), template, (unsigned long long)number, mark + 2);
}

int http_request(char *out, size_t room, const struct options *o, const char *method, const char *path,
                 const char *body, size_t body_length) {
    bool carries = body_length > 0 || strcmp(method, "POST") == 0 || strcmp(method, "PUT") == 0;
    int n = snprintf(out, room, "%s %s HTTP/1.1\r\nHost: %s:%d\r\n", method, path, o->host, o->port);
    if (carries) n += snprintf(out + n, room - (size_t)n, "Content-Type: %s\r\nContent-Length: %zu\r\n", o->content_type, body_length);
    for (int i = 0; i < o->header_count; i++) n += snprintf(out + n, room - (size_t)n, "%s\r\n", o->header[i]);
    n += snprintf(out + n, room - (size_t)n, "\r\n");
    if ((size_t)n + body_length >= room) die("request over %zu bytes", room);
    if (body_length) memcpy(out + n, body, body_length);
    return n + (int)body_length;
}

static uint32_t random_state = 2463534242u;
static char random_letter(void) { /* not a repeated letter: a peer that compresses must not get it for nothing */
    random_state ^= random_state << 13, random_state ^= random_state >> 17, random_state ^= random_state << 5;
    return "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789-_"[random_state & 63];
}

static char *put_message(const struct options *o, char *at, bool json) {
    int n = o->body_bytes;
    if (json && n < 8) die("a JSON message needs at least 8 bytes");
    if (json) at = stpcpy(at, "{\"v\":\""), n -= 8;
    while (n-- > 0) *at++ = random_letter();
    if (json) at = stpcpy(at, "\"}");
    return at;
}

char *make_body(const struct options *o, size_t *length) {
    bool json = strstr(o->content_type, "json") != NULL;
    int messages = o->array > 0 ? o->array : 1;
    char *body = malloc((size_t)(o->body_bytes + 1) * (size_t)messages + 16), *at = body;
    if (o->array > 0) *at++ = '[';
    for (int i = 0; i < messages; i++) {
        if (i) *at++ = ',';
        at = put_message(o, at, json);
    }
    if (o->array > 0) *at++ = ']';
    *length = (size_t)(at - body);
    return body;
}

void http_create_streams(const struct options *o) {
    static struct reply r;
    char request[4096], path[1024], buffer[65536];
    int fd = connect_to(o);
    for (int i = 0; i < o->streams; i++) {
        fill_path(path, sizeof path, o->path, (uint64_t)i);
        int n = http_request(request, sizeof request, o, "PUT", path, NULL, 0);
        send_all(fd, request, (size_t)n);
        bool done = false;
        for (reply_reset(&r); !done;) {
            ssize_t got = recv(fd, buffer, sizeof buffer, 0);
            if (got <= 0) die("connection lost while creating %s", path);
            reply_feed(&r, buffer, (size_t)got, &done);
        }
        if (r.status < 200 || r.status > 299) die("PUT %s answered %d", path, r.status);
    }
    close(fd);
}

/* ---- append: one ready-made request per stream, shared by all connections ---- */
static char **ready;
static size_t *ready_length;
static char *body_bytes;
static size_t body_length;

static void append_setup(const struct options *o) {
    char path[1024];
    bool carries = strcmp(o->method, "POST") == 0;
    body_bytes = carries ? make_body(o, &body_length) : NULL;
    if (o->create) http_create_streams(o);
    if (o->unique || o->scatter) return;
    ready = calloc((size_t)o->streams, sizeof *ready);
    ready_length = calloc((size_t)o->streams, sizeof *ready_length);
    for (int i = 0; i < o->streams; i++) {
        size_t room = body_length + 8192;
        ready[i] = malloc(room);
        fill_path(path, sizeof path, o->path, (uint64_t)i);
        ready_length[i] = (size_t)http_request(ready[i], room, o, o->method, path, body_bytes, body_length);
    }
}

/* The same numbers in every run, far from each other. */
static uint64_t scattered(uint64_t turn) {
    turn = (turn ^ (turn >> 30)) * 0xbf58476d1ce4e5b9u;
    turn = (turn ^ (turn >> 27)) * 0x94d049bb133111ebu;
    return turn ^ (turn >> 31);
}

static void append_next(const struct options *o, struct connection *c) {
    if (o->unique || o->scatter) {
        char path[1024];
        fill_path(path, sizeof path, o->path, o->unique ? c->turn : scattered(c->turn + 1) % (uint64_t)o->streams);
        c->out_length = (size_t)http_request(c->scratch, SCRATCH_BYTES, o, o->method, path, body_bytes, body_length);
        c->out = c->scratch;
        return;
    }
    uint64_t stream = c->turn % (uint64_t)o->streams;
    c->out = ready[stream];
    c->out_length = ready_length[stream];
}

static size_t http_feed(const struct options *o, struct connection *c, const char *bytes, size_t n, bool *done) {
    (void)o;
    size_t used = reply_feed(&c->reply, bytes, n, done);
    if (!*done) return used;
    c->status = c->reply.status;
    c->body_bytes = c->reply.body_bytes;
    return used;
}

/* ---- catch-up read: follow Stream-Next-Offset to the tail, then start again ---- */
static void read_setup(const struct options *o) {
    if (o->create) http_create_streams(o);
}

static void read_next(const struct options *o, struct connection *c) {
    char path[1024], full[1024 + OFFSET_BYTES_MAX + 16];
    fill_path(path, sizeof path, o->path, c->id % (uint64_t)o->streams);
    snprintf(full, sizeof full, "%s%coffset=%s", path, strchr(path, '?') ? '&' : '?', c->offset[0] ? c->offset : "-1");
    c->out_length = (size_t)http_request(c->scratch, SCRATCH_BYTES, o, "GET", full, NULL, 0);
    c->out = c->scratch;
}

static size_t read_feed(const struct options *o, struct connection *c, const char *bytes, size_t n, bool *done) {
    size_t used = http_feed(o, c, bytes, n, done);
    if (!*done) return used;
    bool restart = c->reply.up_to_date || c->reply.next_offset[0] == 0 || c->status != 200;
    memcpy(c->offset, restart ? "" : c->reply.next_offset, restart ? 1 : OFFSET_BYTES_MAX);
    return used;
}

const struct protocol protocol_append = {append_setup, NULL, append_next, http_feed};
const struct protocol protocol_read = {read_setup, NULL, read_next, read_feed};
