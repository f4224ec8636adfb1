// Compiled, not run: everything that the declarations promise, used as a program would.
import { Hub, HubError, fromRuntime, toRuntime } from "./dist/index.js"
import type { Ack, Actor, Broadcast, MailboxPage, Message, Presence, Published, Registration, Subscription } from "./dist/index.js"

interface Quote {
  price: number
}

export async function everything(url: string): Promise<void> {
  const hub = new Hub(url, {
    address: "@(browser/w-1)",
    token: async () => "token",
    capabilities: ["ui"],
    timeouts: { ask: 1000 },
    reconnect: { first: 10, max: 100 },
    WebSocket,
    onNotice: (message: Message) => console.log(message.type),
    onEnd: (error: HubError) => console.log(error.code, error.retryable, error.details),
  })
  await hub.connect()
  const registration: Registration = await hub.register("@(browser/w-1)", { durable: true, commit: "manual" })
  const ack: Ack = await hub.send("@(svc/a)", "t", { n: 1 }, { ack: "accepted", ttl: 1000 })
  const quote = await hub.ask<Quote>("@(svc/a)", "quote", { sku: 7 }, { onPart: (part: Quote) => console.log(part.price) })
  const price: number = quote.price
  const subscription: Subscription = await hub.subscribe("jobs/#", { durable: true, group: "workers", from: "-1" })
  const published: Published = await hub.publish("jobs/eu", "job", null, { durable: true })
  const sent: Broadcast = await hub.broadcast("news", {}, { capability: "ui" })
  const page: MailboxPage = await hub.readMailbox(undefined, { offset: "-1", limit: 10 })
  for await (const actor of hub.discover("*", { capabilities: ["ui"] })) show(actor)
  for await (const event of hub.watch("svc/*", { capability: "quotes" })) {
    const seen: Presence = event
    if (seen.event === "left") break
  }
  for await (const message of hub.messages()) {
    if (message.pattern === "ask") await hub.reply(message, { ok: true }, { final: false })
    else await hub.commit(message)
    await hub.commitEach([message])
  }
  const next: Message | null = await hub.nextMessage(1000)
  await hub.unsubscribe(subscription)
  await hub.unregister(registration.actorAddress)
  const expires: number | null = await hub.refreshToken()
  console.log(ack.status, price, published.stream, sent.total, page.lag, next?.metadata.mailbox?.offset, expires)
  console.log(fromRuntime("local://w-1", "browser"), toRuntime("@(w-1)", "beam"), hub.sessionId, hub.resumed)
  await hub.close()
}

function show(actor: Actor): void {
  console.log(actor.address, actor.online)
}

// What must not compile.
// @ts-expect-error a level that does not exist
export const wrong = (hub: Hub): Promise<Ack> => hub.send("@(a)", "t", null, { ack: "maybe" })
// @ts-expect-error a runtime that does not exist
export const nowhere = (): string => toRuntime("@(a)", "moon")
