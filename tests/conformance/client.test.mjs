// The official JavaScript client, unchanged, against a running server: node --test client.test.mjs
import assert from "node:assert/strict"
import { test } from "node:test"
import { DurableStream, IdempotentProducer, stream } from "@durable-streams/client"

const base = process.env.TAILRACE_TEST_URL
let count = 0
const fresh = (kind) => `${base}/v1/stream/js-client/${kind}-${process.pid}-${(count += 1)}`

/** Follow a JSON stream until `enough` items have come, then let go of it. */
async function follow(url, live, enough, act) {
  const stop = new AbortController()
  const response = await stream({ url, offset: "-1", live, signal: stop.signal })
  const items = []
  await new Promise((resolve, reject) => {
    response.closed.catch(() => {})
    response.subscribeJson(async (batch) => {
      items.push(...batch.items)
      if (items.length >= enough) resolve()
    })
    Promise.resolve(act(items)).catch(reject)
  })
  stop.abort()
  return items
}

test("creates, appends, reads and describes a JSON stream", async () => {
  const handle = await DurableStream.create({ url: fresh("json"), contentType: "application/json" })
  await handle.append(JSON.stringify({ n: 1 }))
  await handle.append(JSON.stringify({ n: 2 }))
  const response = await handle.stream({ live: false })
  assert.deepEqual(await response.json(), [{ n: 1 }, { n: 2 }])
  const head = await handle.head()
  assert.equal(head.exists, true)
  assert.equal(head.contentType, "application/json")
  assert.equal(head.offset, response.offset)
})

test("resumes from an offset without losing or repeating", async () => {
  const handle = await DurableStream.create({ url: fresh("resume"), contentType: "application/json" })
  await handle.append(JSON.stringify("before"))
  const first = await handle.stream({ live: false })
  await first.json()
  await handle.append(JSON.stringify("after"))
  const second = await handle.stream({ live: false, offset: first.offset })
  assert.deepEqual(await second.json(), ["after"])
})

test("keeps bytes as they are", async () => {
  const bytes = Uint8Array.from({ length: 256 }, (_, index) => index)
  const handle = await DurableStream.create({ url: fresh("bytes"), contentType: "application/octet-stream" })
  await handle.append(bytes)
  assert.deepEqual(await (await handle.stream({ live: false })).body(), bytes)
})

for (const live of ["long-poll", "sse"]) {
  test(`follows live by ${live}`, async () => {
    const url = fresh(live)
    const handle = await DurableStream.create({ url, contentType: "application/json" })
    await handle.append(JSON.stringify(0))
    const items = await follow(url, live, 4, async () => {
      for (const n of [1, 2, 3]) await handle.append(JSON.stringify(n))
    })
    assert.deepEqual(items, [0, 1, 2, 3])
  })
}

test("ends a live reader when the stream is closed", async () => {
  const url = fresh("close")
  const handle = await DurableStream.create({ url, contentType: "text/plain" })
  const response = await stream({ url, live: "sse" })
  let text = ""
  response.subscribeText(async (chunk) => {
    text += chunk.text
  })
  await handle.append("all ")
  await handle.close({ body: "done" })
  await response.closed
  assert.equal(text, "all done")
  assert.equal((await handle.head()).streamClosed, true)
})

test("produces exactly once, in order, over many batches", async () => {
  const handle = await DurableStream.create({ url: fresh("producer"), contentType: "application/json" })
  const failures = []
  const producer = new IdempotentProducer(handle, "js-producer", {
    autoClaim: true,
    maxBatchBytes: 512,
    maxInFlight: 5,
    onError: (error) => failures.push(error),
  })
  const sent = Array.from({ length: 500 }, (_, n) => ({ n }))
  for (const message of sent) producer.append(JSON.stringify(message))
  await producer.flush()
  await producer.detach()
  assert.deepEqual(failures, [])
  assert.deepEqual(await (await handle.stream({ live: false })).json(), sent)
})

test("fences a producer that was replaced", async () => {
  const handle = await DurableStream.create({ url: fresh("fence"), contentType: "application/json" })
  const older = new IdempotentProducer(handle, "fenced", { epoch: 0 })
  older.append(JSON.stringify("older"))
  await older.flush()
  const newer = new IdempotentProducer(handle, "fenced", { epoch: 1 })
  newer.append(JSON.stringify("newer"))
  await newer.flush()
  const refused = []
  const late = new IdempotentProducer(handle, "fenced", { epoch: 0, onError: (error) => refused.push(error) })
  late.append(JSON.stringify("late"))
  await late.flush().catch((error) => refused.push(error))
  assert.ok(refused.length > 0)
  assert.deepEqual(await (await handle.stream({ live: false })).json(), ["older", "newer"])
})

test("reports a missing stream and a taken name as its own errors", async () => {
  assert.deepEqual(await DurableStream.head({ url: fresh("missing") }), { exists: false })
  await assert.rejects(stream({ url: fresh("missing"), live: false }), (error) => error.status === 404)
  const url = fresh("taken")
  await DurableStream.create({ url, contentType: "application/json" })
  await assert.rejects(
    DurableStream.create({ url, contentType: "text/plain" }),
    (error) => error.status === 409,
  )
  await DurableStream.delete({ url })
  assert.equal((await DurableStream.head({ url })).exists, false)
})

test("takes 50 messages of 1 MiB, 15 at a time, as the client joins them", async () => {
  // The load of the official benchmark: while one request is under way the client joins what comes meanwhile.
  const handle = await DurableStream.create({ url: fresh("large"), contentType: "application/octet-stream" })
  const message = new Uint8Array(1024 * 1024).fill(42)
  for (let sent = 0; sent < 50; sent += 15) {
    const together = Math.min(15, 50 - sent)
    await Promise.all(Array.from({ length: together }, () => handle.append(message)))
  }
  let [read, offset, done] = [0, "-1", false]
  while (!done) {
    const page = await handle.stream({ live: false, offset })
    read += (await page.body()).length
    ;[offset, done] = [page.offset, page.upToDate]
  }
  assert.equal(read, 50 * message.length)
})

test("takes JSON messages of 1 MiB from 16 clients at once", async () => {
  const message = JSON.stringify({ text: "x".repeat(1024 * 1024) })
  await Promise.all(
    Array.from({ length: 16 }, async () => {
      const handle = await DurableStream.create({ url: fresh("large"), contentType: "application/json" })
      for (let sent = 0; sent < 20; sent += 1) await handle.append(message)
    }),
  )
})
