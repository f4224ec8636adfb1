/* Time, histogram, sockets: the parts every mode needs. */
#define _GNU_SOURCE
#include "load.h"

#include <arpa/inet.h>
#include <errno.h>
#include <fcntl.h>
#include <netinet/in.h>
#include <netinet/tcp.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/resource.h>
#include <sys/socket.h>
#include <time.h>
#include <unistd.h>

_Noreturn void die(const char *format, ...) {
    va_list arguments;
    va_start(arguments, format);
    fputs("load: ", stderr);
    vfprintf(stderr, format, arguments);
    fputc('\n', stderr);
    va_end(arguments);
    exit(2);
}

uint64_t now_ns(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (uint64_t)t.tv_sec * 1000000000u + (uint64_t)t.tv_nsec;
}

double cpu_seconds(void) {
    struct rusage u;
    getrusage(RUSAGE_SELF, &u);
    return (double)(u.ru_utime.tv_sec + u.ru_stime.tv_sec) + (double)(u.ru_utime.tv_usec + u.ru_stime.tv_usec) / 1e6;
}

static unsigned hist_index(uint64_t v) {
    if (v < (1u << HIST_SUB_BITS)) return (unsigned)v;
    unsigned exponent = 63u - (unsigned)__builtin_clzll(v);
    unsigned shift = exponent - HIST_SUB_BITS;
    return ((shift + 1) << HIST_SUB_BITS) + (unsigned)((v >> shift) & ((1u << HIST_SUB_BITS) - 1));
}

static uint64_t hist_value(unsigned index) {
    if (index < (1u << HIST_SUB_BITS)) return index;
    unsigned shift = (index >> HIST_SUB_BITS) - 1;
    uint64_t low = ((uint64_t)(1u << HIST_SUB_BITS) + (index & ((1u << HIST_SUB_BITS) - 1))) << shift;
    return low + (((uint64_t)1 << shift) >> 1); /* middle of the slot */
}

void hist_add(struct hist *h, uint64_t value_ns) {
    unsigned index = hist_index(value_ns);
    h->slot[index < HIST_SLOTS ? index : HIST_SLOTS - 1]++;
    h->count++;
    h->sum_ns += (double)value_ns;
    if (value_ns > h->max_ns) h->max_ns = value_ns;
}

uint64_t hist_quantile(const struct hist *h, double q) {
    uint64_t rank = (uint64_t)(q * (double)h->count), seen = 0;
    if (h->count == 0) return 0;
    if (rank >= h->count) rank = h->count - 1;
    for (unsigned i = 0; i < HIST_SLOTS; i++) {
        seen += h->slot[i];
        if (seen > rank) {
            uint64_t value = hist_value(i);
            return value < h->max_ns ? value : h->max_ns;
        }
    }
    return h->max_ns;
}

void hist_print(const struct hist *h, const char *name) {
    double mean = h->count ? h->sum_ns / (double)h->count : 0;
    printf("\"%s\":{\"count\":%llu,\"mean\":%.1f,\"p50\":%.1f,\"p90\":%.1f,\"p99\":%.1f,\"p999\":%.1f,\"max\":%.1f}", name,
           (unsigned long long)h->count, mean / 1e3, (double)hist_quantile(h, 0.5) / 1e3,
           (double)hist_quantile(h, 0.9) / 1e3, (double)hist_quantile(h, 0.99) / 1e3,
           (double)hist_quantile(h, 0.999) / 1e3, (double)h->max_ns / 1e3);
}

int connect_to(const struct options *o) {
    struct sockaddr_in address = {.sin_family = AF_INET, .sin_port = htons((uint16_t)o->port)};
    if (inet_pton(AF_INET, o->host, &address.sin_addr) != 1) die("host must be an IPv4 address: %s", o->host);
    int fd = socket(AF_INET, SOCK_STREAM | SOCK_CLOEXEC, 0), one = 1;
    if (fd < 0) die("socket: %s", strerror(errno));
    setsockopt(fd, IPPROTO_TCP, TCP_NODELAY, &one, sizeof one);
    if (connect(fd, (struct sockaddr *)&address, sizeof address) < 0) die("connect: %s", strerror(errno));
    return fd;
}

void set_nonblocking(int fd, bool on) {
    int flags = fcntl(fd, F_GETFL);
    fcntl(fd, F_SETFL, on ? flags | O_NONBLOCK : flags & ~O_NONBLOCK);
}

void send_all(int fd, const char *bytes, size_t n) {
    while (n > 0) {
        ssize_t sent = send(fd, bytes, n, MSG_NOSIGNAL);
        if (sent < 0 && errno == EINTR) continue;
        if (sent < 0) die("send: %s", strerror(errno));
        bytes += sent;
        n -= (size_t)sent;
    }
}
