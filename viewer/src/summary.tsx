import { Charts } from "./charts";
import { percent, seconds, setting, short, type Index } from "./data";
import { WhatIf } from "./whatif";

const phases: [string, string][] = [["time/rollout", "rollouts"], ["time/update", "updates"], ["time/eval", "evaluations"]];

function last(index: Index, name: string): [number, number] | null {
  const points = index.points[name];
  return points ? [points[0][points[0].length - 1], points[1][points[1].length - 1]] : null;
}

// All of the time, and the parts of it.
function time(index: Index): [string, string] {
  const sum = (name: string) => (index.points[name]?.[1] ?? []).reduce((total, value) => total + value, 0);
  const parts = phases.map(([name, title]) => [title, sum(name)] as const).filter(([, value]) => value > 0);
  const counted = parts.reduce((total, [, value]) => total + value, 0);
  const [, days, hours, minutes, rest] = /^Duration: (?:(\d+) days?, )?(\d+):(\d+):(\d+)\.$/m.exec(index.run.summary) ?? [];
  const all = hours ? 86400 * +(days ?? 0) + 3600 * +hours + 60 * +minutes + +rest : counted;
  if (all > counted) parts.push(["start and the rest", all - counted]);
  return [seconds(Math.max(all, counted)), parts.map(([title, value]) => `${title} ${seconds(value)}`).join(", ")];
}

// What was trained and how, above every view.
export function Header({ index }: { index: Index }) {
  const { config, summary } = index.run;
  const value = (name: string) => setting(config, name);
  const rank = value("learner.lora_rank");
  const settings = [
    value("steps") && `${value("steps")} steps of ${value("tasks_per_step")} tasks with ${value("rollout.group_size")} episodes each`,
    value("learner.learning_rate") && `learning rate ${+value("learner.learning_rate")}`,
    +rank ? `LoRA of rank ${rank}` : "",
    value("loss.name") && `loss ${value("loss.name")}`,
    value("advantage.name") && `advantage ${value("advantage.name")}`,
    value("seed") && `seed ${value("seed")}`,
  ];
  const facts: [string, string][] = [
    ["Environment", value("env") || (index.texts.env[0] ?? "")],
    ["Model", value("model") || value("recipe.name")],
    ["Settings", settings.filter(Boolean).join(", ")],
    ["Time", time(index)[0]],
    ["Command", /^ {4}(.+)$/m.exec(summary)?.[1] ?? ""],
  ];
  return (
    <dl class="about">
      {facts.map(([name, text]) => text && (
        <div key={name}>
          <dt>{name}</dt>
          <dd title={text}>{name === "Command" ? <code>{text}</code> : text}</dd>
        </div>
      ))}
    </dl>
  );
}

export function Summary({ index, theme }: { index: Index; theme: string }) {
  const success = index.points["eval/success"];
  const facts: [string, string, string][] = [];
  if (success) {
    const ys = success[1];
    const best = Math.max(...ys);
    const shipped = index.points["eval/success_as_shipped"];
    const before = shipped ? `, ${percent(shipped[1][0])} as shipped` : "";
    facts.push(["Success", percent(ys[ys.length - 1]), `in the evaluation after step ${success[0][ys.length - 1]}; ${percent(ys[0])} at first${before}`]);
    facts.push(["Best success", percent(best), `after step ${success[0][ys.indexOf(best)]}`]);
  }
  const reward = last(index, "eval/return");
  if (reward) facts.push(["Return", short(reward[1]), `in the evaluation after step ${reward[0]}`]);
  const steps = Math.max(0, ...(index.points["rollout/return"]?.[0] ?? []));
  facts.push(["Steps", String(steps), "of training"]);
  facts.push(["Episodes", index.episodes.step.length.toLocaleString("en"), index.left_out ? `in this page; ${index.left_out} files are left out` : "kept, all in this page"]);
  facts.push(["Time", ...time(index)]);
  return (
    <main class="summary" tabIndex={-1}>
      <dl class="facts">
        {facts.map(([name, value, more]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>
              <b>{value}</b> <small>{more}</small>
            </dd>
          </div>
        ))}
      </dl>
      {index.run.warnings && <Text title="Warnings" text={index.run.warnings} open kind="warning" />}
      {index.run.failure && <Text title="The first failure of an environment" text={index.run.failure} kind="warning" />}
      <Charts index={index} theme={theme} />
      <WhatIf index={index} />
      <Text title="All settings" text={index.run.config} />
    </main>
  );
}

function Text({ title, text, open, kind }: { title: string; text: string; open?: boolean; kind?: string }) {
  return (
    <details class={kind} open={open}>
      <summary>{title}</summary>
      <pre>{text}</pre>
    </details>
  );
}
