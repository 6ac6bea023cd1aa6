import { useEffect, useRef, useState } from "preact/hooks";
import uPlot from "uplot";
import "uplot/dist/uPlot.min.css";
import { endName, percent, short, type Index } from "./data";

const colours = ["--c1", "--c2", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8"];
const variable = (name: string) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();

const panels: [string, string[]][] = [
  ["Success", ["eval/success", "rollout/success", "eval/success_greedy"]],
  ["Return (sum of the rewards)", ["eval/return", "rollout/return"]],
  ["Outcome", ["eval/outcome", "rollout/outcome"]],
  ["Turns of an episode", ["eval/turns", "rollout/turns"]],
  ["Groups whose episodes have equal rewards", ["rollout/zero_variance_groups"]],
  ["Clipped tokens", ["train/clipped_fraction"]],
  ["Entropy (nats per token)", ["train/entropy"]],
  ["Loss", ["train/loss"]],
  ["Gradient norm", ["train/grad_norm"]],
  ["Log-probability, engine minus trainer (nats)", ["train/logprob_diff_max", "train/logprob_diff_mean"]],
  ["Sampled tokens per second", ["rollout/tokens_per_second"]],
];
const labels: Record<string, string> = { success: "", return: "", outcome: "", turns: "", success_greedy: ", greedy", logprob_diff_max: "largest", logprob_diff_mean: "mean" };
const shares = /success|zero_variance_groups|clipped_fraction|rollout\/stop\//;

// What a metric is called in a chart of several.
function label(name: string): string {
  const [section, ...rest] = name.split("/");
  if (name.startsWith("rollout/stop/")) return endName(rest[1]);
  if (name.startsWith("rollout/reward/")) return rest[1];
  const end = labels[rest.join("/")] ?? rest.join("/");
  return section === "eval" ? `evaluation${end}` : section === "rollout" ? `training${end}` : end;
}

export function Charts({ index, theme }: { index: Index; theme: string }) {
  const known = Object.keys(index.points).sort();
  const [chosen, choose] = useState("");
  const stops = known.filter((name) => name.startsWith("rollout/stop/") && index.points[name][1].some((v) => v > 0));
  const parts = known.filter((name) => name.startsWith("rollout/reward/"));
  const shown = [...panels.slice(0, 4), ["Episodes ended by", stops], ["Parts of the reward", parts], ...panels.slice(4)] as [string, string[]][];
  return (
    <section aria-label="Curves">
      <div class="charts">
        {shown.map(([title, names]) => {
          const there = names.filter((name) => index.points[name]);
          return there.length ? <Chart key={title} title={title} names={there} index={index} theme={theme} /> : null;
        })}
        {chosen && <Chart title={chosen} names={[chosen]} index={index} theme={theme} />}
      </div>
      <label class="inline">
        Another metric{" "}
        <select value={chosen} onChange={(event) => choose(event.currentTarget.value)}>
          <option value="">none</option>
          {known.map((name) => <option key={name}>{name}</option>)}
        </select>
      </label>
    </section>
  );
}

// A constant metric is drawn in the middle, or on the axis of shares.
function range(_: uPlot, low: number, high: number): [number, number] {
  if (low === null || high === null) return [0, 1];
  if (low === high) return low === 0 || low === 1 ? [0, 1] : [low - Math.abs(low) / 2, low + Math.abs(low) / 2];
  const room = (high - low) * 0.05;
  return [low >= 0 && low - room < 0 ? 0 : low - room, high <= 1 && high + room > 1 ? 1 : high + room];
}

function Chart({ title, names, index, theme }: { title: string; names: string[]; index: Index; theme: string }) {
  const place = useRef<HTMLDivElement>(null);
  const plot = useRef<uPlot | null>(null);
  const steps = [...new Set(names.flatMap((name) => index.points[name][0]))].sort((a, b) => a - b);
  const rows = names.map((name) => {
    const [xs, ys] = index.points[name];
    const found = new Map(xs.map((x, i) => [x, ys[i]]));
    return steps.map((step) => found.get(step) ?? null);
  });
  const data = [steps, ...rows] as uPlot.AlignedData;
  const form = names.every((name) => shares.test(name)) ? percent : short;
  useEffect(() => {
    const box = place.current!;
    const grid = { stroke: variable("--line"), width: 1 };
    const axis = { stroke: variable("--soft"), grid, ticks: { show: false }, font: "12px system-ui, sans-serif" };
    const made = new uPlot(
      {
        width: Math.max(200, box.clientWidth),
        height: 188,
        scales: { x: { time: false, range: (_, low, high) => [low, Math.max(high, low + 1)] }, y: { range } },
        legend: { show: true, live: true },
        cursor: { points: { size: 6 }, y: false },
        axes: [
          { ...axis, incrs: [1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000], size: 24, label: "training step", labelSize: 18, labelFont: axis.font },
          { ...axis, size: 58, values: (_, ticks) => ticks.map(form) },
        ],
        series: [
          { label: "step" },
          ...names.map((name, i) => ({
            label: names.length > 1 ? label(name) : "last",
            stroke: variable(colours[i % colours.length]),
            width: i ? 1.5 : 2.5,
            dash: i > 1 ? [6, 4] : undefined,
            spanGaps: true,
            points: { show: index.points[name][0].length < 25, size: 5 },
            value: (_: uPlot, value: number | null, __: number, at: number | null) => (at === null ? form(index.points[name][1].at(-1)!) : value === null ? "" : form(value)),
          })),
        ],
      },
      data,
      box,
    );
    plot.current = made;
    const watch = new ResizeObserver(() => made.setSize({ width: Math.max(200, box.clientWidth), height: 188 }));
    watch.observe(box);
    return () => {
      watch.disconnect();
      made.destroy();
    };
  }, [names.join(), theme]);
  useEffect(() => plot.current?.setData(data), [index]);
  const said = names.map((name) => {
    const ys = index.points[name][1];
    return `${label(name)} from ${form(ys[0])} to ${form(ys[ys.length - 1])}`;
  });
  return (
    <figure class="chart">
      <figcaption>{title}</figcaption>
      <div ref={place} role="img" aria-label={`${title} over training steps: ${said.join(", ")}`} />
    </figure>
  );
}
