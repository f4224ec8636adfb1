/* The physical floor: what disk, loopback and a C program of the same system calls can do here.
 *   bare sync  FILE BYTES SECONDS          one write + one fdatasync at a time
 *   bare ping  REQUEST_BYTES REPLY_BYTES SECONDS [SERVER_CPU CLIENT_CPU]   blocking round trips over loopback
 *   bare serve PORT [FILE]                 smallest HTTP server that acknowledges appends; with FILE it writes what
 *                                          arrived together and calls fdatasync once before it answers
 * `sync` and `ping` print one JSON object; `serve` runs until it is killed. */
#define _GNU_SOURCE
#include "load/load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <sched.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/wait.h>
#include <unistd.h>

#define PREALLOCATED_BYTES (64ll * 1024 * 1024)

static void pin(int cpu) {
    cpu_set_t set;
    if (cpu < 0) return;
    CPU_ZERO(&set);
    CPU_SET(cpu, &set);
    if (sched_setaffinity(0, sizeof set, &set) < 0) die("cannot run on cpu %d: %s", cpu, strerror(errno));
}

static int open_journal(const char *path) {
    int fd = open(path, O_RDWR | O_CREAT | O_TRUNC | O_CLOEXEC, 0600);
    if (fd < 0) die("%s: %s", path, strerror(errno));
    if (posix_fallocate(fd, 0, PREALLOCATED_BYTES) != 0) die("no room for %s", path);
    if (fsync(fd) < 0) die("fsync: %s", strerror(errno));
    return fd;
}

static void measure_sync(const char *path, size_t bytes, double seconds) {
    static struct hist latency;
    char *data = calloc(1, bytes);
    int fd = open_journal(path);
    off_t at = 0;
    uint64_t begin = now_ns(), end = begin + (uint64_t)(seconds * 1e9), now = begin;
    while (now < end) {
        if (pwrite(fd, data, bytes, at) != (ssize_t)bytes || fdatasync(fd) < 0) die("write: %s", strerror(errno));
        at = at + (off_t)bytes + (off_t)bytes > PREALLOCATED_BYTES ? 0 : at + (off_t)bytes;
        uint64_t after = now_ns();
        hist_add(&latency, after - now);
        now = after;
    }
    printf("{\"bytes\":%zu,\"per_s\":%.1f,", bytes, (double)latency.count / ((double)(now - begin) / 1e9));
    hist_print(&latency, "latency_us");
    printf("}\n");
    close(fd);
    unlink(path);
}

static int listen_on(int port) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)port), .sin_addr.s_addr = htonl(INADDR_LOOPBACK)};
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    setsockopt(fd, SOL_SOCKET, SO_REUSEADDR, &one, sizeof one);
    if (bind(fd, (struct sockaddr *)&address, sizeof address) < 0 || listen(fd, 4096) < 0) die("listen: %s", strerror(errno));
    return fd;
}

static int accept_one(int listener) {
    int fd = accept4(listener, NULL, NULL, SOCK_CLOEXEC), one = 1;
    if (fd >= 0) setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    return fd;
}

static bool receive_exactly(int fd, char *buffer, size_t n) {
    for (size_t got = 0; got < n;) {
        ssize_t more = recv(fd, buffer + got, n - got, 0);
        if (more <= 0) return false;
        got += (size_t)more;
    }
    return true;
}

static void measure_ping(size_t request_bytes, size_t reply_bytes, double seconds, int server_cpu, int client_cpu) {
    static struct hist latency;
    char *buffer = calloc(1, request_bytes + reply_bytes);
    int listener = listen_on(0);
    struct sockaddr_in address;
    socklen_t length = sizeof address;
    getsockname(listener, (struct sockaddr *)&address, &length);
    pid_t child = fork();
    if (child == 0) {
        pin(server_cpu);
        int fd = accept_one(listener);
        while (receive_exactly(fd, buffer, request_bytes)) send_all(fd, buffer, reply_bytes);
        _exit(0);
    }
    pin(client_cpu);
    struct options o = {.host = "127.0.0.1", .port = ntohs(address.sin_port)};
    int fd = connect_to(&o);
    uint64_t begin = now_ns(), end = begin + (uint64_t)(seconds * 1e9), now = begin;
    while (now < end) {
        send_all(fd, buffer, request_bytes);
        if (!receive_exactly(fd, buffer, reply_bytes)) die("the echo went away");
        uint64_t after = now_ns();
        hist_add(&latency, after - now);
        now = after;
    }
    close(fd);
    waitpid(child, NULL, 0);
    printf("{\"request_bytes\":%zu,\"reply_bytes\":%zu,\"per_s\":%.1f,", request_bytes, reply_bytes,
           (double)latency.count / ((double)(now - begin) / 1e9));
    hist_print(&latency, "latency_us");
    printf("}\n");
}

/* ---- serve ---- */
#define CLIENTS_MAX 65536
#define CLIENT_BUFFER 16384
struct client {
    int fd;
    size_t length;
    char buffer[CLIENT_BUFFER];
};
static const char accepted[] = "HTTP/1.1 204 No Content\r\nStream-Next-Offset: 00000000000000000004000000\r\n"
                               "Cache-Control: no-store\r\nX-Content-Type-Options: nosniff\r\n\r\n";
static const char healthy[] = "HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok";

/* Takes one whole request from the buffer; returns its body's length, or -1 if it is not all there. */
static long take_request(struct client *c, bool *append, char *batch) {
    char *blank = memmem(c->buffer, c->length, "\r\n\r\n", 4);
    if (!blank) return -1;
    size_t head = (size_t)(blank + 4 - c->buffer), body = 0;
    *blank = 0;
    char *header = strcasestr(c->buffer, "\r\nContent-Length:");
    *blank = '\r';
    if (header) body = strtoul(header + 17, NULL, 10);
    if (c->length < head + body) return -1;
    *append = c->buffer[0] == 'P';
    memcpy(batch, c->buffer + head, body);
    c->length -= head + body;
    memmove(c->buffer, c->buffer + head + body, c->length);
    return (long)body;
}

static void serve(int port, const char *journal_path) {
    static char batch[8 << 20];
    static struct client *answer_to[CLIENTS_MAX];
    struct epoll_event events[1024], e = {.events = EPOLLIN, .data.ptr = NULL};
    int listener = listen_on(port), poller = epoll_create1(EPOLL_CLOEXEC);
    int journal = journal_path ? open_journal(journal_path) : -1;
    off_t at = 0;
    epoll_ctl(poller, EPOLL_CTL_ADD, listener, &e);
    for (;;) {
        int n = epoll_wait(poller, events, 1024, -1), answers = 0;
        size_t length = 0;
        for (int i = 0; i < n; i++) {
            struct client *c = events[i].data.ptr;
            if (!c) {
                c = calloc(1, sizeof *c);
                c->fd = accept_one(listener);
                e.data.ptr = c;
                epoll_ctl(poller, EPOLL_CTL_ADD, c->fd, &e);
                continue;
            }
            ssize_t got = recv(c->fd, c->buffer + c->length, CLIENT_BUFFER - c->length, 0);
            if (got <= 0) {
                close(c->fd);
                free(c);
                continue;
            }
            c->length += (size_t)got;
            bool append = false;
            long body = take_request(c, &append, batch + length + 50);
            if (body < 0) continue;
            if (!append) send_all(c->fd, healthy, sizeof healthy - 1);
            else answer_to[answers++] = c, length += (size_t)body + 50; /* 50: a record's own head */
        }
        if (journal >= 0 && length > 0) {
            if (at + (off_t)length > PREALLOCATED_BYTES) at = 0;
            if (pwrite(journal, batch, length, at) != (ssize_t)length || fdatasync(journal) < 0) die("journal: %s", strerror(errno));
            at += (off_t)length;
        }
        for (int i = 0; i < answers; i++) send_all(answer_to[i]->fd, accepted, sizeof accepted - 1);
    }
}

int main(int argc, char **argv) {
    signal(SIGPIPE, SIG_IGN);
    const char *what = argc > 1 ? argv[1] : "";
    if (strcmp(what, "sync") == 0 && argc == 5) measure_sync(argv[2], (size_t)atol(argv[3]), atof(argv[4]));
    else if (strcmp(what, "ping") == 0 && (argc == 5 || argc == 7))
        measure_ping((size_t)atol(argv[2]), (size_t)atol(argv[3]), atof(argv[4]), argc == 7 ? atoi(argv[5]) : -1, argc == 7 ? atoi(argv[6]) : -1);
    else if (strcmp(what, "serve") == 0 && (argc == 3 || argc == 4)) serve(atoi(argv[2]), argc == 4 ? argv[3] : NULL);
    else die("usage: bare sync FILE BYTES SECONDS | ping REQUEST REPLY SECONDS [CPU CPU] | serve PORT [FILE]");
    return 0;
}
