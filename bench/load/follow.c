/* SSE readers that stay with one stream whatever happens: who loses its connection comes back where the last
 * whole pair of data and control left it. Every reader must see each number once and in order. Somebody else
 * writes the messages, and closes the stream when there are no more. */
#define _GNU_SOURCE
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <netinet/in.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <unistd.h>

#define LINE_BYTES 65536
#define CONNECTS_PER_S 2500
#define PAUSE_NS 200000000ull
#define SPREAD_NS 3000000000ull /* a client that lost its server comes back within so long */
#define TICK_NS 20000000ull

enum state { AWAY, CONNECTING, READING, DONE };
struct follower {
    enum state state;
    int fd;
    uint64_t due_ns;     /* AWAY: when it comes back */
    uint64_t seen, kept; /* the number it waits for; the one after the last control */
    bool closed;
    char offset[OFFSET_BYTES_MAX];
    char *line;
    size_t line_length;
    struct reply reply;
};
static struct {
    struct hist all, calm;
    uint64_t missed, doubled, incomplete, losses, refusals, rotations, done;
    const struct options *o;
} run;
static int poller;
static char receive_buffer[RECV_BUFFER_BYTES];

static void message_seen(struct follower *f, uint64_t number, uint64_t sent_ns, bool calm) {
    if (number < f->seen) {
        run.doubled++;
        return;
    }
    run.missed += number - f->seen;
    f->seen = number + 1;
    uint64_t late_ns = now_ns() - sent_ns;
    hist_add(&run.all, late_ns);
    if (calm) hist_add(&run.calm, late_ns);
}

static void control_seen(struct follower *f, const char *next) {
    size_t length = strcspn(next, "\"");
    if (length >= OFFSET_BYTES_MAX) die("an offset of %zu bytes", length);
    memcpy(f->offset, next, length);
    f->offset[length] = 0;
    f->kept = f->seen;
    if (strstr(f->line, "\"streamClosed\":true")) f->closed = true;
}

static void read_line(struct follower *f) {
    const char *at = f->line;
    f->line[f->line_length] = 0;
    if (strncmp(at, "data:", 5) != 0) return;
    const char *next = strstr(at, "\"streamNextOffset\":\"");
    if (next) {
        control_seen(f, next + 20);
        return;
    }
    while ((at = strstr(at, "{\"n\":")) != NULL) {
        char *end;
        uint64_t number = strtoull(at + 5, &end, 10);
        if (strncmp(end, ",\"t\":", 5) != 0) die("not one of our messages: %.60s", at);
        uint64_t sent_ns = strtoull(end + 5, &end, 10);
        message_seen(f, number, sent_ns, strncmp(end, ",\"c\":1", 6) == 0);
        at += 5;
    }
}

static void body_seen(void *owner, const char *bytes, size_t n) {
    struct follower *f = owner;
    while (n > 0) {
        const char *end = memchr(bytes, '\n', n);
        size_t take = end ? (size_t)(end - bytes) : n;
        if (f->line_length + take >= LINE_BYTES) die("event line over %d bytes", LINE_BYTES);
        memcpy(f->line + f->line_length, bytes, take);
        f->line_length += take;
        if (!end) return;
        read_line(f);
        f->line_length = 0;
        bytes += take + 1;
        n -= take + 1;
    }
}

static void leave(struct follower *f, uint64_t pause_ns) {
    close(f->fd);
    if (f->closed) {
        f->state = DONE;
        run.done++;
        return;
    }
    /* Data without its control was not ours to keep: it comes again. */
    run.incomplete += f->seen - f->kept;
    f->seen = f->kept;
    f->state = AWAY;
    f->due_ns = now_ns() + pause_ns;
}

static void lose(struct follower *f) {
    leave(f, PAUSE_NS + (uint64_t)random() % SPREAD_NS);
}

static void come_back(struct follower *f) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)run.o->port)};
    if (inet_pton(AF_INET, run.o->host, &address.sin_addr) != 1) die("host must be an IPv4 address: %s", run.o->host);
    f->fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC | SOCK_NONBLOCK, 0);
    if (f->fd < 0) die("socket: %s", strerror(errno));
    f->state = CONNECTING;
    if (connect(f->fd, (struct sockaddr *)&address, sizeof address) < 0 && errno != EINPROGRESS) {
        run.refusals++;
        lose(f);
        return;
    }
    struct epoll_event e = {.events = EPOLLOUT, .data.ptr = f};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, f->fd, &e) < 0) die("epoll_ctl: %s", strerror(errno));
}

static void connected(struct follower *f) {
    int error = 0;
    socklen_t length = sizeof error;
    getsockopt(f->fd, SOL_SOCKET, SO_ERROR, &error, &length);
    char request[1024], path[512], full[768];
    fill_path(path, sizeof path, run.o->path, 0);
    snprintf(full, sizeof full, "%s?offset=%s&live=sse", path, f->offset[0] ? f->offset : "-1");
    int n = http_request(request, sizeof request, run.o, "GET", full, NULL, 0);
    if (error || send(f->fd, request, (size_t)n, MSG_NOSIGNAL) != n) {
        run.refusals++;
        lose(f);
        return;
    }
    f->state = READING;
    f->line_length = 0;
    reply_reset(&f->reply);
    f->reply.sink = body_seen;
    f->reply.owner = f;
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = f};
    if (epoll_ctl(poller, EPOLL_CTL_MOD, f->fd, &e) < 0) die("epoll_ctl: %s", strerror(errno));
}

static void readable(struct follower *f) {
    bool done = false;
    ssize_t got = recv(f->fd, receive_buffer, sizeof receive_buffer, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) {
        run.losses++;
        lose(f);
        return;
    }
    reply_feed(&f->reply, receive_buffer, (size_t)got, &done);
    if (f->reply.state != REPLY_HEAD && f->reply.status != 200) {
        if (f->reply.status < 500 && f->reply.status != 429) die("a reader was answered %d", f->reply.status);
        run.refusals++;
        lose(f);
    } else if (done) {
        run.rotations++;
        leave(f, 0);
    }
}

static void print_report(const struct follower *all, double seconds) {
    uint64_t least = UINT64_MAX, most = 0, delivered = 0;
    for (int i = 0; i < run.o->readers; i++) {
        least = all[i].kept < least ? all[i].kept : least;
        most = all[i].kept > most ? all[i].kept : most;
        delivered += all[i].kept;
    }
    printf("{\"mode\":\"follow\",\"readers\":%d,\"seconds\":%.3f,\"finished\":%llu,\"least\":%llu,\"most\":%llu,\"delivered\":%llu,"
           "\"missed\":%llu,\"doubled\":%llu,\"incomplete\":%llu,\"losses\":%llu,\"refusals\":%llu,\"rotations\":%llu,",
           run.o->readers, seconds, (unsigned long long)run.done, (unsigned long long)least, (unsigned long long)most,
           (unsigned long long)delivered, (unsigned long long)run.missed, (unsigned long long)run.doubled,
           (unsigned long long)run.incomplete, (unsigned long long)run.losses, (unsigned long long)run.refusals,
           (unsigned long long)run.rotations);
    hist_print(&run.all, "all_us");
    printf(",");
    hist_print(&run.calm, "calm_us");
    printf("}\n");
}

void run_follow(const struct options *o) {
    run.o = o;
    poller = epoll_create1(EPOLL_CLOEXEC);
    struct follower *all = calloc((size_t)o->readers, sizeof *all);
    uint64_t begin = now_ns(), until = begin + (uint64_t)(o->seconds * 1e9), looked = 0;
    for (int i = 0; i < o->readers; i++) {
        all[i].line = malloc(LINE_BYTES);
        all[i].due_ns = begin + (uint64_t)i * 1000000000ull / CONNECTS_PER_S;
    }
    while (run.done < (uint64_t)o->readers && now_ns() < until) {
        struct epoll_event events[512];
        int n = epoll_wait(poller, events, 512, (int)(TICK_NS / 1000000));
        for (int i = 0; i < n; i++) {
            struct follower *f = events[i].data.ptr;
            if (f->state == CONNECTING) connected(f);
            else if (f->state == READING) readable(f);
        }
        uint64_t now = now_ns();
        if (now - looked < TICK_NS) continue;
        looked = now;
        for (int i = 0; i < o->readers; i++)
            if (all[i].state == AWAY && all[i].due_ns <= now) come_back(&all[i]);
    }
    print_report(all, (double)(now_ns() - begin) / 1e9);
}
