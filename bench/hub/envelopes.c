/* The hub's own wire: WebSocket frames with an envelope each. The relay of node speaks the same. */
#define _GNU_SOURCE
#include "hub.h"

#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <time.h>

#define ENVELOPE_BYTES 4096
#define DATA_BYTES 2560
#define HUB "@(cloudflare/signal-hub)"

static const unsigned char mask[4] = {0x37, 0xfa, 0x21, 0x3d};
static uint64_t ids;

static uint64_t wall_ms(void) {
    struct timespec t;
    clock_gettime(CLOCK_REALTIME, &t);
    return (uint64_t)t.tv_sec * 1000u + (uint64_t)t.tv_nsec / 1000000u;
}

static void put_frame(struct client *c, int opcode, const char *text, size_t n) {
    unsigned char *at = (unsigned char *)out_room(c, n + 14);
    size_t head = 2;
    at[0] = (unsigned char)(0x80 | opcode);
    if (n < 126) at[1] = (unsigned char)(0x80 | n);
    else if (n < 65536) at[1] = 0xfe, at[2] = (unsigned char)(n >> 8), at[3] = (unsigned char)n, head = 4;
    else die("an envelope of %zu bytes", n);
    memcpy(at + head, mask, 4);
    head += 4;
    for (size_t i = 0; i < n; i++) at[head + i] = (unsigned char)text[i] ^ mask[i & 3];
    c->out_length += head + n;
}

/* Ids of one run are not those of another: the hub takes a repeated id for a repeated message, as it should. */
static unsigned long long run_id(void) {
    static unsigned long long id;
    if (!id) id = (unsigned long long)wall_ms() << 24;
    return id;
}

static int envelope(char *out, size_t room, const struct client *c, const char *type, const char *pattern, const char *payload) {
    return snprintf(out, room,
                    "{\"id\":\"%08x-%016llx\",\"from\":\"@(b/%c%u)\",\"to\":\"" HUB "\",\"type\":\"%s\",\"payload\":%s,"
                    "\"pattern\":\"%s\",\"correlationId\":null,\"timestamp\":%llu,\"metadata\":%s,\"ttl\":null,\"signature\":null}",
                    c->number, (unsigned long long)++ids ^ run_id(), "srx"[c->role], c->number, type, payload, pattern,
                    (unsigned long long)wall_ms(),
                    strcmp(type, "hub:connect") == 0 ? "{\"protocolVersion\":\"0.1.0\",\"capabilities\":[\"bench\"]}" : "{}");
}

static void ask(struct client *c, const char *type, const char *answer, const char *payload) {
    char text[ENVELOPE_BYTES];
    int n = envelope(text, sizeof text, c, type, "ask", payload);
    put_frame(c, 1, text, (size_t)n);
    send_all(c->fd, c->out, c->out_length);
    c->out_length = 0;
    wait_for(&wire_hub, c, answer);
}

static void upgrade(const struct plan *p, struct client *c) {
    char request[512], answer[4096];
    int n = snprintf(request, sizeof request,
                     "GET %s HTTP/1.1\r\nHost: bench\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n"
                     "Sec-WebSocket-Version: 13\r\nSec-WebSocket-Key: dGFpbHJhY2UgYmVuY2ghIQ==\r\n\r\n",
                     p->path);
    send_all(c->fd, request, (size_t)n);
    size_t length = 0;
    answer[0] = 0;
    while (!strstr(answer, "\r\n\r\n")) {
        ssize_t got = recv(c->fd, answer + length, sizeof answer - length - 1, 0);
        if (got <= 0) die("the connection ended in the handshake");
        length += (size_t)got;
        answer[length] = 0;
    }
    if (!strstr(answer, " 101 ")) die("no upgrade: %.60s", answer);
}

static void hub_open(const struct plan *p, struct client *c) {
    char payload[256];
    bool durable = strcmp(p->scenario, "durable") == 0, topics = strcmp(p->scenario, "publish") == 0;
    upgrade(p, c);
    ask(c, "hub:connect", "hub:connected", "null");
    if (c->role == RESTING && !p->registers) return;
    if (c->role == RECEIVER && topics) {
        ask(c, "hub:subscribe", "hub:subscribed", "{\"topic\":\"bench/all\"}");
        return;
    }
    if (c->role == SENDER) return; /* its identity is enough to send */
    snprintf(payload, sizeof payload, "{\"actorAddress\":\"@(b/%c%u)\",\"capabilities\":[\"bench\"],\"ttlSeconds\":3600,\"durable\":%s}",
             "srx"[c->role], c->number, durable ? "true" : "false");
    ask(c, "hub:register", "hub:registered", payload);
}

static void hub_send(const struct plan *p, struct client *c, uint32_t target, uint64_t due_ns) {
    char text[ENVELOPE_BYTES], data[DATA_BYTES], payload[DATA_BYTES + 128];
    static size_t around; /* what an envelope has beside its data, found out with the first one */
    size_t wanted = around ? (size_t)p->bytes - around : DATA_BYTES_MIN;
    if (around && (size_t)p->bytes < around + DATA_BYTES_MIN) wanted = DATA_BYTES_MIN;
    bool durable = strcmp(p->scenario, "durable") == 0;
    data[put_data(data, wanted, due_ns)] = 0;
    const char *type = "hub:send";
    if (strcmp(p->scenario, "broadcast") == 0) {
        type = "hub:broadcast";
        snprintf(payload, sizeof payload, "{\"type\":\"bench\",\"data\":%s,\"excludeSelf\":true}", data);
    } else if (strcmp(p->scenario, "publish") == 0) {
        type = "hub:publish";
        snprintf(payload, sizeof payload, "{\"topic\":\"bench/all\",\"type\":\"bench\",\"data\":%s}", data);
    } else {
        snprintf(payload, sizeof payload, "{\"to\":\"@(b/r%u)\",\"type\":\"bench\",\"data\":%s%s}", target, data,
                 durable ? ",\"ack\":\"accepted\"" : "");
    }
    int n = envelope(text, sizeof text, c, type, durable ? "ask" : "tell", payload);
    if (!around) {
        around = (size_t)n - wanted;
        hub_send(p, c, target, due_ns);
        return;
    }
    put_frame(c, 1, text, (size_t)n);
}

static size_t hub_take(struct client *c, char *bytes, size_t n, enum heard *heard, uint64_t *due_ns) {
    if (n < 2) return 0;
    unsigned char *at = (unsigned char *)bytes;
    size_t length = at[1] & 127u, head = 2;
    if (length == 126) {
        if (n < 4) return 0;
        length = (size_t)at[2] << 8 | at[3], head = 4;
    } else if (length == 127) {
        if (n < 10) return 0;
        length = 0, head = 10;
        for (int i = 2; i < 10; i++) length = length << 8 | at[i];
    }
    if (n < head + length) return 0;
    const char *text = bytes + head;
    int opcode = at[0] & 15;
    if (opcode == 9) put_frame(c, 10, text, length);
    else if (opcode == 8) *heard = REFUSED;
    else if (memmem(text, length, "\"type\":\"bench\"", 14) && find_time(text, length, due_ns)) *heard = DELIVERY;
    else if (memmem(text, length, "\"type\":\"hub:delivery_ack\"", 25)) *heard = ACCEPTED;
    else if (memmem(text, length, "\"code\":\"", 8)) *heard = REFUSED;
    return head + length;
}

const struct wire wire_hub = {hub_open, hub_send, hub_take};
