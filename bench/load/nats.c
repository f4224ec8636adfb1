/* NATS JetStream: publish with a reply inbox; the server's acknowledgement is the reply. */
#define _GNU_SOURCE
#include "load.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <unistd.h>

static char *body;
static size_t body_length;

static void wait_for(int fd, const char *what, char *buffer, size_t room) {
    size_t n = 0;
    buffer[0] = 0;
    while (!strstr(buffer, what)) {
        ssize_t got = recv(fd, buffer + n, room - n - 1, 0);
        if (got <= 0) die("nats: connection lost while waiting for %s", what);
        n += (size_t)got;
        buffer[n] = 0;
        if (n + 1 >= room) die("nats: no %s in %zu bytes", what, room);
    }
}

static void greet(int fd, uint32_t inbox) {
    char line[512], answer[8192];
    wait_for(fd, "\r\n", answer, sizeof answer);
    int n = snprintf(line, sizeof line,
                     "CONNECT {\"verbose\":false,\"pedantic\":false,\"lang\":\"c\",\"version\":\"1\",\"protocol\":1,"
                     "\"headers\":true,\"no_responders\":true}\r\nSUB _INBOX.b%u 1\r\nPING\r\n",
                     inbox);
    send_all(fd, line, (size_t)n);
    wait_for(fd, "PONG\r\n", answer, sizeof answer);
}

static void setup(const struct options *o) {
    char line[1024], config[512], subject[256], answer[8192];
    body = make_body(o, &body_length);
    if (!o->create) return;
    int fd = connect_to(o);
    greet(fd, 999999);
    for (int s = 0; s < o->streams; s++) {
        fill_path(subject, sizeof subject, o->path, (uint64_t)s);
        int m = snprintf(config, sizeof config, "{\"name\":\"S%d\",\"subjects\":[\"%s\"],\"storage\":\"file\"}", s, subject);
        int n = snprintf(line, sizeof line, "PUB $JS.API.STREAM.CREATE.S%d _INBOX.b999999 %d\r\n%s\r\n", s, m, config);
        send_all(fd, line, (size_t)n);
        wait_for(fd, "}\r\n", answer, sizeof answer);
        if (strstr(answer, "\"error\"")) die("nats: stream not created: %s", answer);
    }
    close(fd);
}

static void opened(const struct options *o, struct connection *c) {
    (void)o;
    greet(c->fd, c->id);
    if (!c->carry) c->carry = malloc(65536);
}

static void next(const struct options *o, struct connection *c) {
    char subject[256];
    fill_path(subject, sizeof subject, o->path, c->turn % (uint64_t)o->streams);
    int n = snprintf(c->scratch, SCRATCH_BYTES, "PUB %s _INBOX.b%u %zu\r\n", subject, c->id, body_length);
    memcpy(c->scratch + n, body, body_length);
    memcpy(c->scratch + n + body_length, "\r\n", 2);
    c->out = c->scratch;
    c->out_length = (size_t)n + body_length + 2;
}

/* Looks at one line (and payload) at the start of the carry; returns its length, 0 if not whole. */
static size_t take(struct connection *c, bool *done) {
    char *line = c->carry, *end = memchr(line, '\n', c->carry_length);
    if (!end) return 0;
    size_t head = (size_t)(end - line) + 1;
    if (strncmp(line, "PING", 4) == 0) {
        send_all(c->fd, "PONG\r\n", 6);
        return head;
    }
    if (strncmp(line, "-ERR", 4) == 0) die("nats: %.*s", (int)head, line);
    bool with_headers = strncmp(line, "HMSG ", 5) == 0;
    if (!with_headers && strncmp(line, "MSG ", 4) != 0) return head;
    char *last = end;
    while (last > line && *last != ' ') last--;
    size_t payload = (size_t)atol(last + 1);
    if (c->carry_length < head + payload + 2) return 0;
    bool accepted = memmem(line + head, payload, "\"seq\":", 6) && !memmem(line + head, payload, "\"error\"", 7);
    c->status = accepted ? 200 : with_headers ? 503 : 500;
    c->body_bytes = payload;
    *done = true;
    return head + payload + 2;
}

static size_t feed(const struct options *o, struct connection *c, const char *bytes, size_t n, bool *done) {
    (void)o;
    if (c->carry_length + n > 65536) die("nats: line over 64 KiB");
    memcpy(c->carry + c->carry_length, bytes, n);
    c->carry_length += n;
    for (size_t used; !*done && (used = take(c, done)) > 0;) {
        memmove(c->carry, c->carry + used, c->carry_length - used);
        c->carry_length -= used;
    }
    return n;
}

const struct protocol protocol_nats = {setup, opened, next, feed};
