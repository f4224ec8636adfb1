// The `ws` package, unchanged, as a reader of live=ws: node --test websocket.test.mjs
import assert from "node:assert/strict"
import { test } from "node:test"
import WebSocket from "ws"

const base = process.env.TAILRACE_TEST_URL
let count = 0
const fresh = (kind) => `${base}/v1/stream/js-ws/${kind}-${process.pid}-${(count += 1)}`

async function send(method, url, type, body) {
  const answer = await fetch(url, { method, headers: { "Content-Type": type }, body })
  assert.ok(answer.ok, `${method} ${url}: ${answer.status}`)
  return answer.headers.get("stream-next-offset")
}

const close = (url) => fetch(url, { method: "POST", headers: { "Stream-Closed": "true" } })

/** Frames in the order in which they come; `next` waits for one, `closed` for the end. */
function follow(url, offset = "-1", options = {}) {
  const socket = new WebSocket(`${url.replace(/^http/, "ws")}?offset=${offset}&live=ws`, options)
  const frames = []
  const waiting = []
  socket.on("message", (data, isBinary) => {
    assert.equal(isBinary, false, "every frame is text")
    const frame = JSON.parse(data.toString())
    const waiter = waiting.shift()
    if (waiter) waiter(frame)
    else frames.push(frame)
  })
  return {
    socket,
    next: () => (frames.length ? Promise.resolve(frames.shift()) : new Promise((resolve) => waiting.push(resolve))),
    closed: new Promise((resolve, reject) => {
      socket.on("close", (code) => resolve(code))
      socket.on("error", reject)
    }),
  }
}

/** One batch: its data frame, then the control frame that every data frame is followed by. */
async function batch(reader) {
  const data = await reader.next()
  const control = await reader.next()
  assert.deepEqual([data.type, control.type], ["data", "control"])
  return { data, control }
}

test("catches up, follows, and ends with 1000 when the stream is closed", async () => {
  const url = fresh("json")
  const first = await send("PUT", url, "application/json", '[{"n":1},{"n":2}]')
  const reader = follow(url)
  const caughtUp = await batch(reader)
  assert.deepEqual(caughtUp.data, { type: "data", payload: '[{"n":1},{"n":2}]' })
  assert.equal(caughtUp.control.streamNextOffset, first)
  assert.deepEqual([caughtUp.control.upToDate, caughtUp.control.streamClosed], [true, false])
  assert.match(caughtUp.control.streamCursor, /^\d+$/)
  const second = await send("POST", url, "application/json", '{"n":3}')
  const live = await batch(reader)
  assert.equal(live.data.payload, '[{"n":3}]')
  assert.equal(live.control.streamNextOffset, second)
  await close(url)
  assert.deepEqual(await reader.next(), {
    type: "control",
    streamNextOffset: second,
    upToDate: true,
    streamClosed: true,
  })
  assert.equal(await reader.closed, 1000)
})

test("resumes from the offset of a control frame, with nothing lost or repeated", async () => {
  const url = fresh("resume")
  await send("PUT", url, "application/json", '["before"]')
  const first = follow(url)
  const { control } = await batch(first)
  first.socket.close()
  await first.closed
  await send("POST", url, "application/json", '"after"')
  const second = follow(url, control.streamNextOffset)
  assert.equal((await batch(second)).data.payload, '["after"]')
  second.socket.terminate()
})

test("at the tail, the first frame is a control frame alone", async () => {
  const url = fresh("tail")
  const tail = await send("PUT", url, "text/plain", "old")
  const reader = follow(url, "now")
  const control = await reader.next()
  assert.deepEqual([control.type, control.streamNextOffset, control.upToDate], ["control", tail, true])
  await send("POST", url, "text/plain", "zwölf\n")
  assert.deepEqual((await batch(reader)).data, { type: "data", payload: "zwölf\n" })
  reader.socket.terminate()
})

test("bytes come as base64, whole, also above 64 KiB", async () => {
  const bytes = Buffer.from(Uint8Array.from({ length: 100_000 }, (_, index) => index % 256))
  const url = fresh("bytes")
  await send("PUT", url, "application/octet-stream", bytes)
  const reader = follow(url)
  const { data } = await batch(reader)
  assert.equal(data.encoding, "base64")
  assert.deepEqual(Buffer.from(data.payload, "base64"), bytes)
  reader.socket.terminate()
})

test("offers of compression are declined, pings answered, and what the client says is ignored", async () => {
  const url = fresh("talk")
  await send("PUT", url, "application/json", "[1]")
  const reader = follow(url, "-1", { perMessageDeflate: true })
  await batch(reader)
  assert.equal(reader.socket.extensions, "")
  reader.socket.send("hello")
  reader.socket.send(Buffer.from([1, 2, 3]))
  const pong = new Promise((resolve) => reader.socket.once("pong", (data) => resolve(data.toString())))
  reader.socket.ping("still there?")
  assert.equal(await pong, "still there?")
  await send("POST", url, "application/json", "2")
  assert.equal((await batch(reader)).data.payload, "[2]")
  reader.socket.terminate()
})

test("a deleted stream ends its readers with 4404", async () => {
  const url = fresh("deleted")
  await send("PUT", url, "application/json", "[1]")
  const reader = follow(url)
  await batch(reader)
  assert.equal((await fetch(url, { method: "DELETE" })).status, 204)
  assert.equal(await reader.closed, 4404)
})

test("refusals are plain HTTP answers, before the upgrade", async () => {
  await assert.rejects(follow(fresh("missing")).closed, /Unexpected server response: 404/)
  const url = fresh("plain")
  await send("PUT", url, "application/json", "[1]")
  await assert.rejects(follow(url, "nonsense").closed, /Unexpected server response: 400/)
  const answer = await fetch(`${url}?offset=-1&live=ws`)
  assert.equal(answer.status, 426)
  assert.equal((await answer.json()).error.code, "upgrade_required")
})
