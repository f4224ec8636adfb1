/* How each peer is spoken to: NATS, Redis pub/sub and MQTT. What a receiver is called: r0, r1, ... or `all`. */
#define _GNU_SOURCE
#include "hub.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void name_of(char *out, size_t room, const struct plan *p, uint32_t number) {
    bool one = strcmp(p->scenario, "relay") == 0;
    if (one) snprintf(out, room, "r%u", number);
    else snprintf(out, room, "all");
}

static void say(struct client *c, const char *text, size_t n) {
    memcpy(out_room(c, n), text, n);
    c->out_length += n;
    send_all(c->fd, c->out, c->out_length);
    c->out_length = 0;
}

/* ---- NATS, core: no acknowledgement, no storage ---- */

static void nats_open(const struct plan *p, struct client *c) {
    char line[256], name[32];
    wait_for(&wire_nats, c, "INFO ");
    const char *hello = "CONNECT {\"verbose\":false,\"pedantic\":false,\"lang\":\"c\",\"version\":\"1\",\"protocol\":1}\r\n";
    say(c, hello, strlen(hello));
    name_of(name, sizeof name, p, c->number);
    int n = c->role == SENDER ? 0 : snprintf(line, sizeof line, "SUB %s 1\r\n", name);
    n += snprintf(line + n, sizeof line - (size_t)n, "PING\r\n");
    say(c, line, (size_t)n);
    wait_for(&wire_nats, c, "PONG");
}

static void nats_send(const struct plan *p, struct client *c, uint32_t target, uint64_t due_ns) {
    char name[32];
    name_of(name, sizeof name, p, target);
    char *at = out_room(c, (size_t)p->bytes + 64);
    int n = sprintf(at, "PUB %s %d\r\n", name, p->bytes);
    n += (int)put_data(at + n, (size_t)p->bytes, due_ns);
    memcpy(at + n, "\r\n", 2);
    c->out_length += (size_t)n + 2;
}

static size_t nats_take(struct client *c, char *bytes, size_t n, enum heard *heard, uint64_t *due_ns) {
    char *end = memchr(bytes, '\n', n);
    if (!end) return 0;
    size_t head = (size_t)(end - bytes) + 1;
    if (strncmp(bytes, "PING", 4) == 0) {
        memcpy(out_room(c, 6), "PONG\r\n", 6);
        c->out_length += 6;
        return head;
    }
    if (strncmp(bytes, "-ERR", 4) == 0) *heard = REFUSED;
    if (strncmp(bytes, "MSG ", 4) != 0) return head;
    char *last = end;
    while (last > bytes && *last != ' ') last--;
    size_t payload = (size_t)atol(last + 1);
    if (n < head + payload + 2) return 0;
    if (find_time(bytes + head, payload, due_ns)) *heard = DELIVERY;
    return head + payload + 2;
}

/* ---- Redis pub/sub ---- */

static void redis_open(const struct plan *p, struct client *c) {
    char line[128], name[32];
    if (c->role == SENDER) return;
    name_of(name, sizeof name, p, c->number);
    int n = snprintf(line, sizeof line, "*2\r\n$9\r\nSUBSCRIBE\r\n$%zu\r\n%s\r\n", strlen(name), name);
    say(c, line, (size_t)n);
    wait_for(&wire_redis, c, "subscribe");
}

static void redis_send(const struct plan *p, struct client *c, uint32_t target, uint64_t due_ns) {
    char name[32];
    name_of(name, sizeof name, p, target);
    char *at = out_room(c, (size_t)p->bytes + 128);
    int n = sprintf(at, "*3\r\n$7\r\nPUBLISH\r\n$%zu\r\n%s\r\n$%d\r\n", strlen(name), name, p->bytes);
    n += (int)put_data(at + n, (size_t)p->bytes, due_ns);
    memcpy(at + n, "\r\n", 2);
    c->out_length += (size_t)n + 2;
}

static size_t redis_take(struct client *c, char *bytes, size_t n, enum heard *heard, uint64_t *due_ns) {
    (void)c;
    size_t used = redis_value_length(bytes, n);
    if (used == 0) return 0;
    if (*bytes == '-') *heard = REFUSED;
    else if (*bytes == '*' && find_time(bytes, used, due_ns)) *heard = DELIVERY;
    return used;
}

/* ---- MQTT 3.1.1, quality of service 0 ---- */

static size_t put_length(char *out, size_t value) {
    size_t n = 0;
    do {
        out[n] = (char)(value & 127);
        value >>= 7;
        if (value) out[n] |= (char)128;
        n++;
    } while (value);
    return n;
}

static size_t put_text(char *out, const char *text) {
    size_t length = strlen(text);
    out[0] = (char)(length >> 8);
    out[1] = (char)length;
    memcpy(out + 2, text, length);
    return length + 2;
}

static void mqtt_open(const struct plan *p, struct client *c) {
    char packet[256], name[32];
    size_t n = 2;
    snprintf(name, sizeof name, "%c%u", "srx"[c->role], c->number);
    n += put_text(packet + n, "MQTT");
    memcpy(packet + n, "\x04\x02\x00\x00", 4); /* level 4, clean session, no keep-alive */
    n += 4;
    n += put_text(packet + n, name);
    packet[0] = 0x10;
    packet[1] = (char)(n - 2);
    say(c, packet, n);
    wait_for(&wire_mqtt, c, "\x20");
    if (c->role == SENDER) return;
    name_of(name, sizeof name, p, c->number);
    n = 2;
    packet[n++] = 0;
    packet[n++] = 1;
    n += put_text(packet + n, name);
    packet[n++] = 0;
    packet[0] = (char)0x82;
    packet[1] = (char)(n - 2);
    say(c, packet, n);
    wait_for(&wire_mqtt, c, "\x90");
}

static void mqtt_send(const struct plan *p, struct client *c, uint32_t target, uint64_t due_ns) {
    char name[32];
    name_of(name, sizeof name, p, target);
    char *at = out_room(c, (size_t)p->bytes + 64);
    size_t n = 0;
    at[n++] = 0x30;
    n += put_length(at + n, strlen(name) + 2 + (size_t)p->bytes);
    n += put_text(at + n, name);
    n += put_data(at + n, (size_t)p->bytes, due_ns);
    c->out_length += n;
}

static size_t mqtt_take(struct client *c, char *bytes, size_t n, enum heard *heard, uint64_t *due_ns) {
    (void)c;
    size_t length = 0, head = 1;
    for (int shift = 0; head < n; shift += 7) {
        length |= (size_t)(bytes[head] & 127) << shift;
        if (!(bytes[head++] & 128)) break;
        if (head == n) return 0;
    }
    if (n < 2 || n < head + length) return 0;
    if (((unsigned char)bytes[0] & 0xf0) == 0x30 && find_time(bytes + head, length, due_ns)) *heard = DELIVERY;
    return head + length;
}

const struct wire wire_nats = {nats_open, nats_send, nats_take};
const struct wire wire_redis = {redis_open, redis_send, redis_take};
const struct wire wire_mqtt = {mqtt_open, mqtt_send, mqtt_take};
