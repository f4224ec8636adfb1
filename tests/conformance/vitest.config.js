import { defineConfig } from "vitest/config"

export default defineConfig({
  test: {
    include: ["suite.test.js"],
    // The suite measures time to live and long-polls: one file, one process, nothing beside it.
    pool: "forks",
    fileParallelism: false,
    watch: false,
    // One test compares 100 KiB byte by byte: on a busy machine that alone takes longer than the default.
    testTimeout: 30_000,
  },
})
