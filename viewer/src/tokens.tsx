import { useMemo, useRef, useState } from "preact/hooks";
import { sequences, short, signed, type Episode, type Index, type Measure, type Turn } from "./data";

const measures: [Measure, string, string][] = [
  ["advantages", "advantage", "Blue is above 0, orange below."],
  ["engine_logprobs", "engine log-probability", "The darker, the less likely the token was."],
  ["trainer_logprobs", "trainer log-probability", "The darker, the less likely the token was."],
  ["ratios", "ratio", "Blue is above 1, orange below; as the loss had it."],
  ["clipped", "clipped", "Orange tokens give no policy gradient."],
  ["difference", "engine − trainer", "Difference of the log-probabilities; blue is above 0, orange below."],
  ["entropies", "entropy", "The darker, the less sure the policy was, in nats."],
  ["versions", "weights", "Blue tokens were sampled with newer weights, orange ones with older."],
];
const zero: Partial<Record<Measure, number>> = { advantages: 0, ratios: 1, difference: 0 };

interface Scale {
  middle: number | undefined;
  most: number;
  ends: [number, number];
}

function scale(turns: Turn[], measure: Measure): Scale {
  let [least, most] = [Infinity, -Infinity];
  for (const turn of turns) {
    for (const value of turn.values[measure]) {
      if (value === null) continue;
      least = Math.min(least, +value);
      most = Math.max(most, +value);
    }
  }
  if (least > most) least = most = 0;
  const middle = measure === "versions" ? (least + most) / 2 : zero[measure];
  return { middle, most: Math.max(Math.abs(least - (middle ?? 0)), Math.abs(most - (middle ?? 0))), ends: [least, most] };
}

function range({ middle, most, ends }: Scale, measure: Measure): string {
  if (measure === "versions") return `Weights of steps ${ends[0]} to ${ends[1]}.`;
  return measure !== "clipped" && most > 0 ? `Full colour: ${middle ? `${short(middle)} ± ` : ""}${short(most)}.` : "";
}

function colour(value: number | null | undefined, measure: Measure, { middle, most }: Scale): string {
  if (value === null || value === undefined) return "transparent";
  if (measure === "clipped") return value ? "rgb(var(--minus) / 0.6)" : "rgb(var(--plus) / 0.08)";
  const size = most ? Math.min(1, Math.abs(+value - (middle ?? 0)) / most) : 0;
  const strength = (0.06 + 0.6 * Math.sqrt(size)).toFixed(3);
  if (middle === undefined) return `rgb(var(--heat) / ${strength})`;
  return size === 0 ? "transparent" : `rgb(var(--${+value > middle ? "plus" : "minus"}) / ${strength})`;
}

interface Spot {
  turn: number;
  place: number;
  sampled: boolean;
}

const shown = (text: string) => (text === "" ? "∅" : text.replace(/\n/g, "↵\n").replace(/\t/g, "→\t"));

function isKnown(turns: Turn[], name: Measure): boolean {
  const values = turns.flatMap((turn) => turn.values[name]);
  return name === "versions" ? new Set(values).size > 1 : values.some((value) => value !== null);
}

export function Tokens({ index, episode }: { index: Index; episode: Episode }) {
  const { turns } = episode;
  const known = useMemo(() => measures.filter(([name]) => isKnown(turns, name)), [episode]);
  const [wanted, setMeasure] = useState<Measure>(known[0]?.[0] ?? "engine_logprobs");
  const measure = known.some(([name]) => name === wanted) ? wanted : (known[0]?.[0] ?? "engine_logprobs");
  const [spot, setSpot] = useState<Spot | null>(null);
  const [at, setAt] = useState<Record<string, string>>({});
  const spread = useMemo(() => scale(turns, measure), [episode, measure]);
  const paths = useMemo(() => sequences(turns), [episode]);
  const box = useRef<HTMLDivElement>(null);
  const note = known.find(([name]) => name === measure)?.[2] ?? "";

  const show = (element: Element | null) => {
    const token = element?.closest<HTMLElement>("[data-t]");
    if (!token) return setSpot(null);
    const [turn, place, sampled] = token.dataset.t!.split(",").map(Number);
    const bounds = token.getBoundingClientRect();
    const side: Record<string, string> = bounds.top > innerHeight / 2 ? { bottom: `${innerHeight - bounds.top + 6}px` } : { top: `${bounds.bottom + 6}px` };
    setAt({ left: `${Math.max(8, Math.min(bounds.left, innerWidth - 300))}px`, ...side });
    setSpot({ turn, place, sampled: sampled === 1 });
    box.current?.querySelector(".here")?.classList.remove("here");
    token.classList.add("here");
  };
  const key = (event: KeyboardEvent) => {
    const step = { ArrowRight: 1, ArrowLeft: -1 }[event.key];
    if (event.key === "Escape" && spot) {
      event.stopPropagation();
      setSpot(null);
    }
    if (!step) return;
    event.preventDefault();
    const all = [...box.current!.querySelectorAll<HTMLElement>("[data-t]")].filter((token) => token.offsetParent);
    const now = all.findIndex((token) => token.classList.contains("here"));
    const next = all[Math.max(0, Math.min(all.length - 1, now + step))];
    next?.scrollIntoView({ block: "nearest" });
    show(next ?? null);
  };
  if (index.episodes.redacted[episode.row]) return <p class="empty">A text of this episode looked like a secret, so its tokens are left out.</p>;
  if (!turns.some((turn) => turn.action_ids.length)) return <p class="empty">This episode has no tokens: its policy worked with text.</p>;
  const token = (turn: Turn, place: number, sampled: boolean) => {
    const id = (sampled ? turn.action_ids : turn.prompt_ids)[place];
    const value = turn.values[measure][place];
    return (
      <span
        key={`${sampled}${place}`}
        data-t={`${turn.turn},${place},${+sampled}`}
        class={sampled ? "t" : "t read"}
        style={sampled ? { background: colour(value, measure, spread) } : undefined}
      >
        {shown(index.tokens[id] ?? `[${id}]`)}
      </span>
    );
  };
  const stretch = (k: number) => (
    <span key={k} class="turn" aria-label={`turn ${k + 1}`}>
      {turns[k].prompt_ids.map((_, i) => token(turns[k], i, false))}
      {turns[k].action_ids.map((_, i) => token(turns[k], i, true))}
    </span>
  );
  return (
    <div class="tokens">
      <div class="row" role="radiogroup" aria-label="Colour tokens by">
        {known.map(([name, title]) => (
          <label key={name} class={name === measure ? "pill on" : "pill"}>
            <input type="radio" name="measure" value={name} checked={name === measure} onChange={() => setMeasure(name)} />
            {title}
          </label>
        ))}
      </div>
      <p class="soft note">
        {note} {range(spread, measure)} Grey tokens were read, not sampled. Arrow keys go from token to token.
        {!turns.some((turn) => turn.values.trainer_logprobs.some((value) => value !== null)) && " This episode was not trained on, so only the engine's log-probabilities are known."}
      </p>
      <div
        ref={box}
        class="flow"
        tabIndex={0}
        role="group"
        aria-label="Tokens"
        onPointerOver={(event) => show(event.target as Element)}
        onPointerLeave={() => setSpot(null)}
        onClick={(event) => show(event.target as Element)}
        onKeyDown={key}
        onBlur={() => setSpot(null)}
      >
        {paths.map((path, s) => {
          const own = path.filter((k) => turns[k].sequence === s);
          const shared = path.filter((k) => turns[k].sequence !== s);
          const count = shared.reduce((sum, k) => sum + turns[k].prompt_ids.length + turns[k].action_ids.length, 0);
          return (
            <section key={s} aria-label={`Sequence ${s + 1}`}>
              {paths.length > 1 && <h3>Sequence {s + 1} of {paths.length}: turns {path.map((k) => k + 1).join(", ")}</h3>}
              {shared.length > 0 && (
                <details class="shared">
                  <summary>
                    {count} tokens of turn{shared.length > 1 ? "s" : ""} {shared.map((k) => k + 1).join(", ")} are shared with an earlier sequence, which trains them
                  </summary>
                  {shared.map(stretch)}
                </details>
              )}
              {own.map(stretch)}
            </section>
          );
        })}
      </div>
      {spot && <Tip index={index} turn={turns[spot.turn]} spot={spot} at={at} />}
    </div>
  );
}

function Tip({ index, turn, spot, at }: { index: Index; turn: Turn; spot: Spot; at: Record<string, string> }) {
  const id = (spot.sampled ? turn.action_ids : turn.prompt_ids)[spot.place];
  const rows: [string, string][] = [["id", String(id)], ["turn", `${turn.turn + 1}, token ${spot.place + 1}`]];
  if (spot.sampled) {
    for (const [name, title] of measures) {
      const value = turn.values[name][spot.place];
      if (value === null || value === undefined) continue;
      const text = name === "versions" ? `of step ${value}` : name === "clipped" ? (value ? "yes" : "no") : name === "advantages" || name === "difference" ? signed(+value) : name === "ratios" ? (+value).toFixed(6) : short(+value);
      rows.push([title, name.endsWith("logprobs") ? `${text} (p ${short(Math.exp(+value))})` : text]);
    }
  } else rows.push(["", "read, not sampled"]);
  return (
    <div class="tip" role="status" style={at} key={JSON.stringify(at)}>
      <code>{JSON.stringify(index.tokens[id] ?? "")}</code>
      <dl>
        {rows.map(([name, value]) => (
          <div key={name}>
            <dt>{name}</dt>
            <dd>{value}</dd>
          </div>
        ))}
      </dl>
    </div>
  );
}
