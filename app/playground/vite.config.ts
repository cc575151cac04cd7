import { defineConfig } from "vite";

// The page is at /playground, without a slash behind it, wherever the server is mounted: what it loads is named
// from there.
export default defineConfig({
  build: {
    outDir: "static",
    assetsDir: "assets",
    emptyOutDir: true,
    target: "es2022",
    modulePreload: { polyfill: false },
    assetsInlineLimit: 0,
  },
  oxc: { jsx: { runtime: "automatic", importSource: "preact" } },
  experimental: {
    renderBuiltUrl: (name, { hostType }) => (hostType === "html" ? `playground/${name}` : { relative: true }),
  },
});
