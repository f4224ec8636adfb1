/* Closed loop: every connection has one request on the way; its reply starts the next one. With a rate, each connection's
 * requests are due at fixed times instead, and latency counts from then: a late answer makes those behind it late too. */
#define _GNU_SOURCE
#include "load.h"

#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/socket.h>
#include <sys/time.h>
#include <sys/timerfd.h>
#include <unistd.h>

#define STALL_NS 10000000000ull /* nothing heard for this long: give up and say so */
#define EVENTS 512

static struct {
    struct hist latency;
    uint64_t statuses[1000];
    uint64_t replies, good, bytes, reconnects, unanswered;
    uint64_t begin_ns, end_ns, last_ns, count_target, begun, turns;
    double begin_cpu;
    bool measuring, stalled;
} run;
static char receive_buffer[RECV_BUFFER_BYTES];
static int poller, timer;

static bool polled(const struct options *o) { return o->connections > 1 || o->rate_per_s > 0; }

static void watch(struct connection *c, uint32_t events, int operation) {
    struct epoll_event e = {.events = events, .data.ptr = c};
    if (epoll_ctl(poller, operation, c->fd, &e) < 0) die("epoll_ctl: %s", strerror(errno));
}

static void open_connection(const struct options *o, const struct protocol *p, struct connection *c) {
    c->fd = connect_to(o);
    c->carry_length = 0;
    reply_reset(&c->reply);
    if (p->opened) p->opened(o, c);
    if (polled(o)) {
        set_nonblocking(c->fd, true);
        watch(c, EPOLLIN, EPOLL_CTL_ADD);
    }
}

static void flush_out(struct connection *c) {
    while (c->out_sent < c->out_length) {
        ssize_t sent = send(c->fd, c->out + c->out_sent, c->out_length - c->out_sent, MSG_NOSIGNAL);
        if (sent >= 0) {
            c->out_sent += (size_t)sent;
            continue;
        }
        if (errno == EINTR) continue;
        if (errno == EAGAIN) watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
        return; /* a broken connection shows up as a failed recv */
    }
}

static bool begin_request(const struct options *o, const struct protocol *p, struct connection *c, uint64_t now) {
    if (run.count_target && run.begun >= run.count_target) return false;
    c->turn = run.turns++;
    p->next(o, c);
    run.begun++;
    c->out_sent = 0;
    c->sent_ns = now;
    flush_out(c);
    return true;
}

/* After an answer: at once, or when it is due. */
static bool next_request(const struct options *o, const struct protocol *p, struct connection *c, uint64_t now) {
    if (o->rate_per_s <= 0) return begin_request(o, p, c, now);
    c->due_ns += 1000000000ull * (uint64_t)o->connections / (uint64_t)o->rate_per_s;
    c->waiting = true;
    return true;
}

/* Sends what is due, and sets the timer for the next one. */
static void begin_due(const struct options *o, const struct protocol *p, struct connection *all) {
    uint64_t now = now_ns(), soonest = UINT64_MAX;
    for (struct connection *c = all; c < all + o->connections; c++) {
        if (!c->waiting) continue;
        if (c->due_ns <= now) {
            c->waiting = false;
            begin_request(o, p, c, c->due_ns);
        } else if (c->due_ns < soonest) {
            soonest = c->due_ns;
        }
    }
    if (soonest == UINT64_MAX) return;
    struct itimerspec at = {.it_value = {.tv_sec = (time_t)(soonest / 1000000000u), .tv_nsec = (long)(soonest % 1000000000u)}};
    timerfd_settime(timer, TFD_TIMER_ABSTIME, &at, NULL);
}

static void start_pacing(const struct options *o, struct connection *all) {
    uint64_t now = now_ns();
    for (int i = 0; i < o->connections; i++) {
        all[i].due_ns = now + 1000000000ull * (uint64_t)i / (uint64_t)o->rate_per_s;
        all[i].waiting = true;
    }
    timer = timerfd_create(CLOCK_MONOTONIC, TFD_NONBLOCK | TFD_CLOEXEC);
    struct epoll_event e = {.events = EPOLLIN | EPOLLET, .data.ptr = NULL};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, timer, &e) < 0) die("epoll_ctl: %s", strerror(errno));
}

static void start_measuring(uint64_t now) {
    run.measuring = true;
    run.begin_ns = now;
    run.begin_cpu = cpu_seconds();
}

static void finish_reply(struct connection *c, uint64_t now) {
    run.last_ns = now;
    run.replies++;
    if (!run.measuring) return;
    run.statuses[c->status > 0 && c->status < 1000 ? c->status : 0]++;
    if (c->status < 200 || c->status > 299) return;
    run.good++;
    run.bytes += c->body_bytes;
    hist_add(&run.latency, now - c->sent_ns);
}

static ssize_t receive(const struct options *o, struct connection *c) {
    struct reply *r = &c->reply;
    if (!o->discard || r->state != REPLY_LENGTH || r->remaining == 0) return recv(c->fd, receive_buffer, sizeof receive_buffer, 0);
    size_t want = r->remaining < (1u << 20) ? (size_t)r->remaining : (1u << 20);
    ssize_t got = recv(c->fd, receive_buffer, want, MSG_TRUNC);
    if (got > 0) r->remaining -= (uint64_t)got, r->body_bytes += (uint64_t)got;
    return got > 0 ? -2 : got; /* -2: bytes were taken by the kernel */
}

/* One readable event. Returns false when the connection has nothing more to do. */
static bool serve(const struct options *o, const struct protocol *p, struct connection *c) {
    ssize_t got = receive(o, c);
    if (got == -1 && (errno == EAGAIN || errno == EINTR)) return true;
    if (got == 0 || got == -1) {
        close(c->fd);
        run.reconnects++;
        run.unanswered++;
        run.begun--;
        open_connection(o, p, c);
        return begin_request(o, p, c, now_ns());
    }
    bool done = false;
    size_t length = got == -2 ? 0 : (size_t)got;
    size_t used = p->feed(o, c, receive_buffer, length, &done);
    if (!done) return true;
    if (used != length) die("%zu bytes after the end of a reply", length - used);
    uint64_t now = now_ns();
    finish_reply(c, now);
    reply_reset(&c->reply);
    return next_request(o, p, c, now);
}

static void print_report(const struct options *o, double seconds, double cpu) {
    uint64_t errors = 0;
    bool first = true;
    int messages = o->array > 0 ? o->array : 1;
    printf("{\"mode\":\"%s\",\"connections\":%d,\"streams\":%d,\"body_bytes\":%d,\"seconds\":%.4f,\"ops\":%llu,\"ops_per_s\":%.1f,"
           "\"messages_per_s\":%.1f,\"bytes\":%llu,\"bytes_per_s\":%.0f,",
           o->mode, o->connections, o->streams, o->body_bytes, seconds, (unsigned long long)run.good,
           (double)run.good / seconds, (double)run.good * messages / seconds, (unsigned long long)run.bytes,
           (double)run.bytes / seconds);
    hist_print(&run.latency, "latency_us");
    printf(",\"status\":{");
    for (int s = 0; s < 1000; s++) {
        if (run.statuses[s] == 0) continue;
        printf("%s\"%d\":%llu", first ? "" : ",", s, (unsigned long long)run.statuses[s]);
        first = false;
        if (s < 200 || s > 299) errors += run.statuses[s];
    }
    printf("},\"errors\":%llu,\"reconnects\":%llu,\"stalled\":%s,\"load_cpu_share\":%.3f}\n",
           (unsigned long long)(errors + run.unanswered), (unsigned long long)run.reconnects,
           run.stalled ? "true" : "false", cpu / seconds);
    fflush(stdout);
}

/* What has come since the last report, or since the measuring began. */
static void report(const struct options *o, uint64_t now) {
    print_report(o, (double)(now - run.begin_ns) / 1e9, cpu_seconds() - run.begin_cpu);
    memset(&run.latency, 0, sizeof run.latency);
    memset(run.statuses, 0, sizeof run.statuses);
    run.good = run.bytes = run.reconnects = run.unanswered = 0;
    start_measuring(now);
}

static bool finished(const struct options *o, uint64_t now) {
    if (!run.measuring && now >= run.begin_ns) start_measuring(now), run.end_ns = now + (uint64_t)(o->seconds * 1e9);
    if (run.count_target) return run.replies >= run.count_target;
    if (!run.measuring) return false;
    if (now >= run.end_ns) return true;
    if (o->every_seconds > 0 && now >= run.begin_ns + (uint64_t)(o->every_seconds * 1e9)) report(o, now);
    return false;
}

static void loop_one(const struct options *o, const struct protocol *p, struct connection *c) {
    struct timeval patience = {.tv_sec = 1};
    setsockopt(c->fd, SOL_SOCKET, SO_RCVTIMEO, &patience, sizeof patience);
    for (uint64_t now = now_ns(); !finished(o, now); now = now_ns()) {
        run.stalled = now > run.last_ns + STALL_NS;
        if (run.stalled || !serve(o, p, c)) return;
    }
}

static void loop_many(const struct options *o, const struct protocol *p, struct connection *all) {
    struct epoll_event events[EVENTS];
    for (uint64_t now = now_ns(); !finished(o, now); now = now_ns()) {
        if (o->rate_per_s > 0) begin_due(o, p, all);
        int n = epoll_wait(poller, events, EVENTS, 100);
        if (n == 0 && now > run.last_ns + STALL_NS) {
            run.stalled = true;
            return;
        }
        for (int i = 0; i < n; i++) {
            struct connection *c = events[i].data.ptr;
            if (c == NULL) continue; /* the timer */
            if (events[i].events & EPOLLOUT) {
                watch(c, EPOLLIN, EPOLL_CTL_MOD);
                flush_out(c);
            }
            if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) serve(o, p, c);
        }
    }
}

void run_closed_loop(const struct options *o, const struct protocol *p) {
    struct connection *all = calloc((size_t)o->connections, sizeof *all);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (p->setup) p->setup(o);
    for (int i = 0; i < o->connections; i++) {
        all[i].id = (uint32_t)i;
        all[i].scratch = malloc(SCRATCH_BYTES);
        open_connection(o, p, &all[i]);
    }
    uint64_t now = now_ns();
    run.count_target = o->count;
    run.last_ns = now;
    run.begin_ns = now + (o->count ? 0 : (uint64_t)(o->warmup_seconds * 1e9));
    if (o->count) start_measuring(now);
    if (o->rate_per_s > 0) start_pacing(o, all);
    else for (int i = 0; i < o->connections; i++) begin_request(o, p, &all[i], now_ns());
    if (polled(o)) loop_many(o, p, all);
    else loop_one(o, p, &all[0]);
    report(o, o->count ? run.last_ns : now_ns());
    if (run.stalled) exit(3);
}
