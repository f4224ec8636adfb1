/* hubload: actors at a message hub. Prints one JSON object. See --help. */
#define _GNU_SOURCE
#include "hub.h"

#include <errno.h>
#include <getopt.h>
#include <signal.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/epoll.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <unistd.h>

#define STALL_NS 10000000000ull /* nothing heard for this long: give up and say so */
#define READ_BYTES 65536

static const char usage[] =
    "hubload --wire hub|nats|redis|mqtt --scenario S --port N [options]   (latencies in microseconds)\n"
    "  relay       --clients pairs; each sender keeps --window messages on their way to its receiver\n"
    "  broadcast   one sender, --clients receivers, --window messages on their way to all of them\n"
    "  publish     the same by a topic\n"
    "  durable     --clients senders, each waits until its message is accepted by a mailbox of its own\n"
    "  idle        --clients connections that do nothing until the standard input ends (--register: with an address)\n"
    "  --bytes N (350)  --seconds S (5)  --warmup S (1)  --rate N   relay: due at fixed times, so many per second\n"
    "  --path P (/hub/ws)  --host A (127.0.0.1)\n";

static struct {
    struct hist latency;
    uint64_t heard, begin_ns, end_ns, last_ns, sent, delivered, refused;
    double begin_cpu;
    bool measuring, stalled;
} run;
static const struct plan *plan;
static const struct wire *wire;
static struct client *senders, *receivers;
static int poller;

char *out_room(struct client *c, size_t n) {
    if (c->out_length + n > c->out_room) {
        c->out_room = (c->out_length + n) * 2;
        c->out = realloc(c->out, c->out_room);
    }
    return c->out + c->out_length;
}

static void watch(struct client *c, uint32_t events, int operation) {
    struct epoll_event e = {.events = events, .data.ptr = c};
    if (epoll_ctl(poller, operation, c->fd, &e) < 0) die("epoll_ctl: %s", strerror(errno));
}

void out_flush(struct client *c) {
    while (c->out_sent < c->out_length) {
        ssize_t sent = send(c->fd, c->out + c->out_sent, c->out_length - c->out_sent, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0 && errno != EAGAIN) die("send: %s", strerror(errno));
        if (sent < 0) {
            watch(c, EPOLLIN | EPOLLOUT, EPOLL_CTL_MOD);
            return;
        }
        c->out_sent += (size_t)sent;
    }
    c->out_length = c->out_sent = 0;
}

size_t put_data(char *out, size_t bytes, uint64_t due_ns) {
    int head = sprintf(out, "{\"t\":\"%020llu\",\"p\":\"", (unsigned long long)due_ns);
    if (bytes < (size_t)head + 2) bytes = (size_t)head + 2;
    memset(out + head, 'x', bytes - (size_t)head - 2);
    memcpy(out + bytes - 2, "\"}", 2);
    return bytes;
}

bool find_time(const char *bytes, size_t n, uint64_t *due_ns) {
    const char *at = memmem(bytes, n, "{\"t\":\"", 6);
    if (!at || at + 26 > bytes + n) return false;
    uint64_t value = 0;
    for (int i = 6; i < 26; i++) value = value * 10 + (uint64_t)(at[i] - '0');
    *due_ns = value;
    return true;
}

static size_t in_room(struct client *c) {
    if (c->in_room - c->in_length < c->in_room / 2 || !c->in) {
        c->in_room = c->in_room ? c->in_room * 2 : c->role == RESTING ? 4096 : READ_BYTES;
        c->in = realloc(c->in, c->in_room);
    }
    return c->in_room - c->in_length;
}

void wait_for(const struct wire *w, struct client *c, const char *text) {
    for (;;) {
        enum heard heard = NOTHING;
        uint64_t due;
        for (size_t used; (used = w->take(c, c->in, c->in_length, &heard, &due)) > 0;) {
            bool found = memmem(c->in, used, text, strlen(text)) != NULL;
            if (heard == REFUSED) die("refused: %.*s", (int)(used < 300 ? used : 300), c->in);
            memmove(c->in, c->in + used, c->in_length - used);
            c->in_length -= used;
            if (found) return;
        }
        size_t room = in_room(c);
        ssize_t got = recv(c->fd, c->in + c->in_length, room, 0);
        if (got <= 0) die("the connection ended before %s came", text);
        c->in_length += (size_t)got;
    }
}

static void open_client(struct client *c, uint32_t number, enum role role) {
    c->number = number;
    c->role = role;
    c->fd = connect_to(&plan->to);
    in_room(c);
    wire->open(plan, c);
    set_nonblocking(c->fd, true);
    watch(c, EPOLLIN, EPOLL_CTL_ADD);
}

static void send_to(struct client *c, uint32_t target, uint64_t due_ns) {
    c->sent_ns = due_ns;
    wire->send(plan, c, target, due_ns);
    run.sent++;
}

static void count(uint64_t now, uint64_t due_ns) {
    run.last_ns = now;
    if (!run.measuring) return;
    run.heard++;
    if (due_ns >= run.begin_ns) hist_add(&run.latency, now - due_ns);
}

/* What a message that was heard brings about: in a closed loop, the next one. */
static void on_heard(struct client *c, enum heard heard, uint64_t now, uint64_t due_ns) {
    if (heard == REFUSED) {
        run.refused++;
    } else if (heard == ACCEPTED && strcmp(plan->scenario, "durable") == 0) {
        count(now, c->sent_ns);
        send_to(c, c->number, now);
    } else if (heard == DELIVERY) {
        run.delivered++;
        count(now, due_ns);
        if (strcmp(plan->scenario, "relay") == 0 && plan->rate_per_s == 0) send_to(&senders[c->number], c->number, now);
        else if (plan->rate_per_s == 0 && run.sent * (uint64_t)plan->clients < run.delivered + (uint64_t)plan->window * (uint64_t)plan->clients)
            send_to(&senders[0], 0, now);
    }
}

static void readable(struct client *c) {
    size_t room = in_room(c), place = 0;
    ssize_t got = recv(c->fd, c->in + c->in_length, room, 0);
    if (got < 0 && (errno == EAGAIN || errno == EINTR)) return;
    if (got <= 0) die("a connection ended");
    c->in_length += (size_t)got;
    uint64_t now = now_ns(), due = 0;
    while (place < c->in_length) {
        enum heard heard = NOTHING;
        size_t used = wire->take(c, c->in + place, c->in_length - place, &heard, &due);
        if (used == 0) break;
        place += used;
        if (heard != NOTHING) on_heard(c, heard, now, due);
    }
    memmove(c->in, c->in + place, c->in_length - place);
    c->in_length -= place;
    if (c->out_length) out_flush(c);
    struct client *sender = c->role == RECEIVER ? strcmp(plan->scenario, "relay") == 0 ? &senders[c->number] : &senders[0] : NULL;
    if (sender && sender->out_length) out_flush(sender);
}

static void poll_once(int timeout_ms) {
    struct epoll_event events[256];
    int n = epoll_wait(poller, events, 256, timeout_ms);
    for (int i = 0; i < n; i++) {
        struct client *c = events[i].data.ptr;
        if (events[i].events & EPOLLOUT) {
            watch(c, EPOLLIN, EPOLL_CTL_MOD);
            out_flush(c);
        }
        if (events[i].events & (EPOLLIN | EPOLLERR | EPOLLHUP)) readable(c);
    }
}

static void begin(int sender_count) {
    puts("ready"); /* whoever measures the server begins now */
    fflush(stdout);
    uint64_t now = now_ns();
    run.last_ns = now;
    run.begin_ns = now + (uint64_t)(plan->warmup_seconds * 1e9);
    run.end_ns = run.begin_ns + (uint64_t)(plan->seconds * 1e9);
    if (plan->rate_per_s > 0) return;
    for (int i = 0; i < sender_count; i++) {
        for (int k = 0; k < plan->window; k++) send_to(&senders[i], (uint32_t)i, now_ns());
        out_flush(&senders[i]);
    }
}

static void loop(void) {
    uint64_t start = now_ns(), due_count = 0;
    double step_ns = plan->rate_per_s > 0 ? 1e9 / plan->rate_per_s : 0;
    for (uint64_t now = start; now < run.end_ns; now = now_ns()) {
        if (!run.measuring && now >= run.begin_ns) {
            run.measuring = true;
            run.begin_ns = now;
            run.begin_cpu = cpu_seconds();
        }
        if (now > run.last_ns + STALL_NS) {
            run.stalled = true;
            break;
        }
        for (uint64_t due; step_ns > 0 && (due = start + (uint64_t)((double)due_count * step_ns)) <= now; due_count++) {
            uint32_t pair = (uint32_t)(due_count % (uint64_t)plan->clients);
            send_to(&senders[pair], pair, due);
            out_flush(&senders[pair]);
        }
        poll_once(step_ns > 0 ? 0 : 100); /* the load has a core of its own: with a rate it looks all the time */
    }
}

static void print_report(void) {
    double seconds = (double)(now_ns() - run.begin_ns) / 1e9;
    printf("{\"scenario\":\"%s\",\"clients\":%d,\"window\":%d,\"bytes\":%d,\"seconds\":%.4f,\"messages\":%llu,\"messages_per_s\":%.1f,",
           plan->scenario, plan->clients, plan->window, plan->bytes, seconds, (unsigned long long)run.heard, (double)run.heard / seconds);
    hist_print(&run.latency, "latency_us");
    printf(",\"refused\":%llu,\"stalled\":%s,\"load_cpu_share\":%.3f}\n", (unsigned long long)run.refused,
           run.stalled ? "true" : "false", (cpu_seconds() - run.begin_cpu) / seconds);
}

static void rest(void) {
    uint64_t began = now_ns();
    struct client *all = calloc((size_t)plan->clients, sizeof *all);
    for (int i = 0; i < plan->clients; i++) open_client(&all[i], (uint32_t)i, RESTING);
    double seconds = (double)(now_ns() - began) / 1e9;
    printf("{\"clients\":%d,\"seconds\":%.4f,\"per_s\":%.1f}\n", plan->clients, seconds, (double)plan->clients / seconds);
    fflush(stdout);
    struct epoll_event e = {.events = EPOLLIN, .data.ptr = NULL};
    if (epoll_ctl(poller, EPOLL_CTL_ADD, 0, &e) < 0) die("the standard input cannot be waited for: %s", strerror(errno));
    for (;;) {
        struct epoll_event events[256];
        int n = epoll_wait(poller, events, 256, -1);
        for (int i = 0; i < n; i++) {
            if (!events[i].data.ptr) return;
            readable(events[i].data.ptr);
        }
    }
}

static void measure(void) {
    bool relay = strcmp(plan->scenario, "relay") == 0, durable = strcmp(plan->scenario, "durable") == 0;
    int sender_count = relay || durable ? plan->clients : 1;
    senders = calloc((size_t)sender_count, sizeof *senders);
    receivers = calloc((size_t)plan->clients, sizeof *receivers);
    for (int i = 0; i < plan->clients; i++) {
        open_client(&receivers[i], (uint32_t)i, RECEIVER);
        if (durable) close(receivers[i].fd); /* its mailbox stays */
    }
    for (int i = 0; i < sender_count; i++) open_client(&senders[i], (uint32_t)i, SENDER);
    begin(sender_count);
    loop();
    print_report();
}

enum { O_WIRE = 256, O_SCENARIO, O_PORT, O_HOST, O_PATH, O_CLIENTS, O_WINDOW, O_BYTES, O_SECONDS, O_WARMUP, O_RATE, O_REGISTER, O_HELP };
static const struct option names[] = {
    {"wire", 1, 0, O_WIRE}, {"scenario", 1, 0, O_SCENARIO}, {"port", 1, 0, O_PORT}, {"host", 1, 0, O_HOST},
    {"path", 1, 0, O_PATH}, {"clients", 1, 0, O_CLIENTS}, {"window", 1, 0, O_WINDOW}, {"bytes", 1, 0, O_BYTES},
    {"seconds", 1, 0, O_SECONDS}, {"warmup", 1, 0, O_WARMUP}, {"rate", 1, 0, O_RATE}, {"register", 0, 0, O_REGISTER},
    {"help", 0, 0, O_HELP}, {0, 0, 0, 0}};

static const struct wire *wire_of(const char *name) {
    if (strcmp(name, "hub") == 0) return &wire_hub;
    if (strcmp(name, "nats") == 0) return &wire_nats;
    if (strcmp(name, "redis") == 0) return &wire_redis;
    if (strcmp(name, "mqtt") == 0) return &wire_mqtt;
    die("unknown wire %s", name);
}

int main(int argc, char **argv) {
    struct plan p = {.to = {.host = "127.0.0.1"}, .scenario = "relay", .path = "/hub/ws", .clients = 100, .window = 8,
                     .bytes = 350, .seconds = 5, .warmup_seconds = 1};
    wire = &wire_hub;
    for (int o; (o = getopt_long(argc, argv, "", names, NULL)) != -1;) {
        switch (o) {
        case O_WIRE: wire = wire_of(optarg); break;
        case O_SCENARIO: p.scenario = optarg; break;
        case O_PORT: p.to.port = atoi(optarg); break;
        case O_HOST: p.to.host = optarg; break;
        case O_PATH: p.path = optarg; break;
        case O_CLIENTS: p.clients = atoi(optarg); break;
        case O_WINDOW: p.window = atoi(optarg); break;
        case O_BYTES: p.bytes = atoi(optarg); break;
        case O_SECONDS: p.seconds = atof(optarg); break;
        case O_WARMUP: p.warmup_seconds = atof(optarg); break;
        case O_RATE: p.rate_per_s = atof(optarg); break;
        case O_REGISTER: p.registers = true; break;
        case O_HELP: fputs(usage, stdout); return 0;
        default: fputs(usage, stderr); return 2;
        }
    }
    if (p.to.port <= 0 || p.clients < 1 || p.window < 1 || p.bytes < DATA_BYTES_MIN || p.bytes > 2048) die("see --help");
    plan = &p;
    struct rlimit files;
    getrlimit(RLIMIT_NOFILE, &files);
    files.rlim_cur = files.rlim_max;
    setrlimit(RLIMIT_NOFILE, &files);
    signal(SIGPIPE, SIG_IGN);
    poller = epoll_create1(EPOLL_CLOEXEC);
    if (strcmp(p.scenario, "idle") == 0) rest();
    else measure();
    return run.stalled ? 3 : 0;
}
