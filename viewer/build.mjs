// Bundles the sources into gspo_env/runs/page.html: one file that loads nothing.
import { build } from "esbuild";
import { createHash } from "node:crypto";
import { readFileSync, writeFileSync } from "node:fs";

const bundled = await build({
  entryPoints: ["src/main.tsx"],
  bundle: true,
  minify: true,
  format: "iife",
  target: ["es2022"],
  jsx: "automatic",
  jsxImportSource: "preact",
  charset: "ascii",
  legalComments: "inline",
  outdir: "out",
  write: false,
});
const text = (end) => bundled.outputFiles.find((file) => file.path.endsWith(end)).text.trim();
// The HTML parser must not find the end of the element in the script.
const script = text(".js").replaceAll("</script", "<\\/script").replaceAll("<!--", "<\\!--");
const style = text(".css");
const hash = (source) => `'sha256-${createHash("sha256").update(source).digest("base64")}'`;
const page = readFileSync("src/page.html", "utf8")
  .replace("SCRIPT_HASH", () => hash(script))
  .replace("STYLE_HASH", () => hash(style))
  .replace("STYLE", () => style)
  .replace("SCRIPT", () => script);
writeFileSync("../gspo_env/runs/page.html", page);
