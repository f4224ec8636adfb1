// Against a running server: TAILRACE_TEST_URL=http://... node --test hub.test.mjs
import assert from "node:assert/strict"
import { test } from "node:test"
import { Hub, HubError, fromRuntime, toRuntime } from "./dist/index.js"

const base = process.env.TAILRACE_TEST_URL
const reconnect = { first: 10, max: 100 }
let count = 0

/** A connected and registered actor with an address of its own. */
async function actor(t, options = {}) {
  const address = `@(js/a-${process.pid}-${(count += 1)})`
  const hub = new Hub(base, { address, reconnect, ...options })
  await hub.connect()
  t.after(() => hub.close())
  await hub.register(undefined, options.registering)
  return hub
}

test("addresses of other runtimes", () => {
  assert.equal(toRuntime("@(w-1)", "browser"), "local://w-1")
  assert.equal(fromRuntime("local://w-1", "browser"), "@(w-1)")
  for (const text of ["remote://do/p/q", "remote://worker/p/q", "worker://p/q", "do://p/q"]) {
    assert.equal(fromRuntime(text, "cloudflare"), "@(p/q)")
  }
  assert.equal(toRuntime("@(p/q)", "cloudflare"), "remote://do/p/q")
  assert.equal(toRuntime("@(p/q)", "beam"), "p/q")
  assert.equal(fromRuntime("p/q", "beam"), "@(p/q)")
  assert.equal(fromRuntime("@(p/q)", "seag"), "@(p/q)")
  assert.throws(() => fromRuntime("a b", "beam"), HubError)
  assert.throws(() => toRuntime("@(a/pk)", "local"), { code: "invalid_request" })
})

test("tells, with and without an acknowledgement", async (t) => {
  const [one, other] = [await actor(t), await actor(t)]
  const sent = await one.send(other.identity, "greeting", { text: "hello" })
  const message = await other.nextMessage()
  assert.deepEqual(sent, { messageId: message.metadata.originalMessageId, status: "sent" })
  assert.equal(message.type, "greeting")
  assert.equal(message.from, one.identity)
  assert.deepEqual(message.payload, { text: "hello" })
  const ack = await one.send(other.identity, "greeting", { n: 2 }, { ack: "delivered" })
  assert.equal(ack.status, "delivered")
  assert.deepEqual((await other.nextMessage()).payload, { n: 2 })
})

test("an unknown actor is an error that says so", async (t) => {
  const one = await actor(t)
  await assert.rejects(one.send("@(js/nobody)", "x", null, { ack: "delivered" }), { code: "unknown_actor" })
})

test("asks and replies, in parts and with failures", async (t) => {
  const [asker, service] = [await actor(t), await actor(t)]
  const serving = (async () => {
    for await (const message of service.messages()) {
      if (message.type === "quote") {
        await service.reply(message, { part: 1 }, { final: false })
        await service.reply(message, { price: message.payload.sku * 2 })
      } else {
        await service.replyError(message, "no_such_thing", "there is none")
        break
      }
    }
  })()
  const parts = []
  const reply = await asker.ask(service.identity, "quote", { sku: 7 }, { onPart: (part) => parts.push(part) })
  assert.deepEqual(reply, { price: 14 })
  assert.deepEqual(parts, [{ part: 1 }])
  await assert.rejects(asker.ask(service.identity, "other"), { code: "no_such_thing" })
  await serving
})

test("discovers, publishes and broadcasts", async (t) => {
  const capability = `c-${process.pid}-${count}`
  const [one, other] = [await actor(t), await actor(t, { registering: { capabilities: [capability] } })]
  const found = []
  for await (const { address } of one.discover("*", { capabilities: [capability] })) found.push(address)
  assert.deepEqual(found, [other.identity])

  const subscription = await other.subscribe(`orders-${process.pid}/+/created`)
  const published = await one.publish(`orders-${process.pid}/eu/created`, "order", { id: 1 })
  assert.equal(published.subscriberCount, 1)
  const message = await other.nextMessage()
  assert.deepEqual([message.metadata.topic, message.payload], [`orders-${process.pid}/eu/created`, { id: 1 }])
  await other.unsubscribe(subscription)
  const unheard = await one.publish(`orders-${process.pid}/eu/created`, "order", { id: 2 })
  assert.equal(unheard.subscriberCount, 0)

  const sent = await one.broadcast("news", { v: 2 }, { capability })
  assert.deepEqual([sent.deliveredCount, sent.total], [1, 1])
  assert.equal((await other.nextMessage()).type, "news")
})

test("a lost connection is taken up again, with everything that was held", async (t) => {
  const [one, other] = [await actor(t), await actor(t)]
  await other.subscribe(`again-${process.pid}`)
  other.drop()
  // A question is answered by the session that comes next.
  await other.request("hub:queue_stats")
  assert.equal(other.resumed, true)
  await one.send(other.identity, "after", { n: 1 })
  assert.equal((await other.nextMessage()).type, "after")
  await one.publish(`again-${process.pid}`, "topic", null)
  assert.equal((await other.nextMessage()).type, "topic")
})

test("a kept message is committed after it was processed", async (t) => {
  const one = await actor(t)
  const kept = await actor(t, { registering: { durable: true, commit: "manual" } })
  const ack = await one.send(kept.identity, "task", { n: 1 }, { ack: "accepted" })
  assert.equal(ack.status, "accepted")
  const message = await kept.nextMessage()
  assert.equal(message.metadata.mailbox.offset, ack.offset)
  assert.equal((await kept.readMailbox()).messages.length, 1)
  assert.equal((await kept.commit(message)).committed, ack.offset)
  assert.equal((await kept.readMailbox()).messages.length, 0)
})

test("members of a durable group commit what they have done", async (t) => {
  const topic = `jobs-${process.pid}`
  const manual = { registering: { commit: "manual" } }
  const [shop, one, two] = [await actor(t), await actor(t, manual), await actor(t, manual)]
  for (const worker of [one, two]) await worker.subscribe(topic, { durable: true, group: "workers" })
  for (let number = 0; number < 4; number += 1) await shop.publish(topic, "job", number)
  const done = [await one.nextMessage(), await one.nextMessage()]
  await one.commitEach(done)
  const left = await two.nextMessage()
  await two.close()
  const again = await one.nextMessage()
  assert.deepEqual([again.payload, again.metadata.redelivered], [left.payload, true])
  await one.commit(again)
})

test("presence tells who is there and who comes and goes", async (t) => {
  const room = `room-${process.pid}`
  const [watcher, guest] = [await actor(t), await actor(t)]
  await guest.register(`@(${room}/first)`)
  const events = watcher.watch(`@(${room}/*)`)
  const next = async () => {
    const { event, actorAddress } = (await events.next()).value
    return `${event} ${actorAddress}`
  }
  assert.equal(await next(), `joined @(${room}/first)`)
  await guest.register(`@(${room}/second)`)
  assert.equal(await next(), `joined @(${room}/second)`)
  watcher.drop()
  await guest.unregister(`@(${room}/first)`)
  assert.equal(await next(), `left @(${room}/first)`)
  await events.return()
})

const WebSocket = globalThis.WebSocket ?? (await import("ws")).default

/** Real sockets, whose frames a test changes or loses: `null` closes the socket instead of passing the frame on. */
function socketsWith({ sent = (frame) => frame, received = (frame) => frame }) {
  const sockets = { opened: 0, WebSocket: null }
  sockets.WebSocket = class extends WebSocket {
    number = (sockets.opened += 1)
    send(text) {
      const frame = sent(JSON.parse(text), this.number)
      if (frame === null) this.close()
      else super.send(JSON.stringify(frame))
    }
    set onmessage(handle) {
      super.onmessage = ({ data }) => {
        const frame = received(JSON.parse(data), this.number)
        if (frame === null) this.close()
        else handle({ data: JSON.stringify(frame) })
      }
    }
  }
  return sockets
}

test("presence events that are lost with their connection arrive after it is resumed", async (t) => {
  const room = `lost-${process.pid}`
  let losses = 0
  const received = (frame) => (frame.payload?.event === "left" && (losses += 1) === 2 ? null : frame)
  const guest = await actor(t)
  const service = await actor(t)
  await guest.register(`@(${room}/guest)`)
  await service.register(`@(${room}/service)`, { durable: true })
  const watcher = await actor(t, { WebSocket: socketsWith({ received }).WebSocket })
  const events = watcher.watch(`@(${room}/*)`)
  const next = async () => {
    const { event, actorAddress } = (await events.next()).value
    return `${event} ${actorAddress}`
  }
  assert.deepEqual([await next(), await next()], [`joined @(${room}/guest)`, `joined @(${room}/service)`])
  await service.close()
  assert.equal(await next(), `left @(${room}/service)`)
  await guest.unregister(`@(${room}/guest)`)
  assert.equal(await next(), `left @(${room}/guest)`)
  assert.deepEqual([losses, watcher.resumed], [2, true])
  // A durable address without a session did not join because of the new snapshot.
  await guest.register(`@(${room}/third)`)
  assert.equal(await next(), `joined @(${room}/third)`)
  await events.return()
})

test("presence watches survive a connection that fails while they are restored", async (t) => {
  const rooms = [1, 2, 3].map((number) => `restored-${process.pid}-${number}`)
  const opened = []
  // The second connection is a new session, and fails before it gets the id of its second watch.
  const sent = (frame, number) => {
    if (frame.type === "hub:connect" && number === 2) frame.metadata.resumeToken = null
    if (frame.payload.action === "watch") opened.push(number)
    return frame
  }
  const received = (frame, number) => {
    const isSecondWatch = number === 2 && opened.length === rooms.length + 2
    return isSecondWatch && frame.payload.actors ? null : frame
  }
  const watcher = await actor(t, { WebSocket: socketsWith({ sent, received }).WebSocket })
  const guest = await actor(t)
  const watches = []
  for (const room of rooms) {
    await guest.register(`@(${room}/first)`)
    const events = watcher.watch(`@(${room}/*)`)
    assert.equal((await events.next()).value.event, "joined")
    watches.push(events)
  }
  const next = watches.map((events) => events.next())
  watcher.drop()
  for (const room of rooms) await guest.unregister(`@(${room}/first)`)
  assert.deepEqual((await Promise.all(next)).map(({ value }) => value.event), ["left", "left", "left"])
  assert.deepEqual([opened, watcher.resumed], [[1, 1, 1, 2, 2, 3, 3], true])
  for (const events of watches) await events.return()
})

test("pauses end with the connection", async (t) => {
  // The hub says of the first connection that the recipient cannot keep up, and nothing after that.
  const received = (frame, number) =>
    number === 1 && frame.type === "hub:queue_stats_response"
      ? { ...frame, type: "hub:pause", correlationId: null, payload: { targets: [other.identity] } }
      : frame
  const other = await actor(t)
  let isPaused
  const paused = new Promise((resolve) => (isPaused = resolve))
  const onNotice = ({ type }) => type === "hub:pause" && isPaused()
  const one = await actor(t, { WebSocket: socketsWith({ received }).WebSocket, onNotice })
  const stats = one.request("hub:queue_stats")
  await paused
  const sending = one.send(other.identity, "x", 1)
  one.drop()
  await Promise.all([stats, sending])
  assert.equal((await other.nextMessage()).payload, 1)
})

test("a token that cannot be had is an error of the client", async () => {
  const broken = new Hub(base, { reconnect, token: () => Promise.reject(new Error("no token today")) })
  await assert.rejects(broken.connect(), { name: "HubError", code: "connect_failed", message: /no token today/ })
})

test("a closed client says so", async (t) => {
  const one = await actor(t)
  const waiting = one.nextMessage()
  await one.close()
  assert.equal(await waiting, null)
  await assert.rejects(one.send("@(js/x)", "x"), { code: "connection_lost" })
  const nowhere = new Hub("http://127.0.0.1:9", { reconnect })
  await assert.rejects(nowhere.connect(), { code: "connect_failed" })
})
