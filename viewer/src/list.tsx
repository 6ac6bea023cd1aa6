import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { everything, idOf, short, taskOf, type Filter, type Index } from "./data";

const height = 46;
const sorts: [string, string][] = [["step", "step"], ["task", "task"], ["total_reward", "return"], ["outcome", "outcome"], ["success", "success"], ["num_turns", "turns"], ["tokens", "sampled tokens"], ["stop_reason", "end reason"]];

export function Filters({ index, filter, change, count }: { index: Index; filter: Filter; change: (filter: Filter) => void; count: number }) {
  const set = (part: Partial<Filter>) => change({ ...filter, ...part });
  const number = (text: string) => (text.trim() === "" || Number.isNaN(+text) ? null : +text);
  const range = (title: string, name: "step" | "turns" | "reward", step: string) => (
    <fieldset>
      <legend>{title}</legend>
      {[0, 1].map((end) => (
        <input
          key={end}
          type="number"
          step={step}
          placeholder={end ? "most" : "least"}
          aria-label={`${end ? "Most" : "Least"} ${title.toLowerCase()}`}
          value={filter[name][end] ?? ""}
          onInput={(event) => {
            const bounds = [...filter[name]] as Filter["step"];
            bounds[end] = number(event.currentTarget.value);
            set({ [name]: bounds });
          }}
        />
      ))}
    </fieldset>
  );
  const choice = (title: string, name: "phase" | "success" | "stop" | "sort", options: [string, string][]) => (
    <label>
      <span>{title}</span>
      <select value={filter[name]} onChange={(event) => set({ [name]: event.currentTarget.value })}>
        {options.map(([value, text]) => <option key={value} value={value}>{text}</option>)}
      </select>
    </label>
  );
  const changed = JSON.stringify({ ...filter, sort: "", down: true }) !== JSON.stringify({ ...everything, sort: "" });
  const names: Record<string, string> = { train: "training", eval: "evaluation", greedy: "evaluation, greedy" };
  return (
    <form class="filters" role="search" aria-label="Filter the episodes" onSubmit={(event) => event.preventDefault()}>
      <div class="row">
        {choice("Played in", "phase", [["", "all"], ...index.texts.phase.map((p) => [p!, names[p!] ?? p!] as [string, string])])}
        {choice("Success", "success", [["", "any"], ["true", "yes"], ["false", "no"]])}
        {choice("Ended by", "stop", [["", "any"], ...index.texts.stop_reason.map((s) => [s!, s!] as [string, string])])}
      </div>
      <div class="row">
        <label class="wide">
          <span>Task</span>
          <input type="search" id="search" placeholder="seed, key or options" value={filter.task} onInput={(event) => set({ task: event.currentTarget.value })} />
        </label>
        {choice("Sort by", "sort", sorts)}
        <button type="button" class="icon" aria-label={filter.down ? "Largest first; change to smallest first" : "Smallest first; change to largest first"} onClick={() => set({ down: !filter.down })}>
          {filter.down ? "↓" : "↑"}
        </button>
      </div>
      <details>
        <summary>Ranges</summary>
        <div class="row">
          {range("Step", "step", "1")}
          {range("Turns", "turns", "1")}
          {range("Return", "reward", "any")}
        </div>
      </details>
      <div class="row count">
        <output aria-live="polite">{count.toLocaleString("en")} of {index.episodes.step.length.toLocaleString("en")} episodes</output>
        {changed && <button type="button" onClick={() => change({ ...everything, sort: filter.sort, down: filter.down })}>Show all</button>}
      </div>
    </form>
  );
}

export function List({ index, rows, chosen, open }: { index: Index; rows: number[]; chosen: number | null; open: (row: number) => void }) {
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [size, setSize] = useState(600);
  const at = chosen === null ? -1 : rows.indexOf(chosen);
  useEffect(() => {
    const watch = new ResizeObserver(() => setSize(box.current?.clientHeight ?? 600));
    watch.observe(box.current!);
    return () => watch.disconnect();
  }, []);
  useLayoutEffect(() => {
    const element = box.current!;
    if (at < 0) return;
    if (at * height < element.scrollTop) element.scrollTop = at * height;
    if ((at + 1) * height > element.scrollTop + element.clientHeight) element.scrollTop = (at + 1) * height - element.clientHeight;
  }, [at]);
  const first = Math.max(0, Math.floor(top / height) - 5);
  const last = Math.min(rows.length, Math.ceil((top + size) / height) + 5);
  const e = index.episodes;
  const key = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(size / height) - 1);
    const moves: Record<string, number> = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: rows.length - 1 };
    if (!(event.key in moves) || !rows.length) return;
    event.preventDefault();
    open(rows[Math.min(rows.length - 1, Math.max(0, moves[event.key]))]);
  };
  return (
    <div
      class="list"
      ref={box}
      role="listbox"
      tabIndex={0}
      aria-label="Episodes"
      aria-activedescendant={at >= 0 ? `row-${chosen}` : undefined}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
      onKeyDown={key}
    >
      <div style={{ height: `${rows.length * height}px` }}>
        {rows.slice(first, last).map((row, i) => {
          const won = e.success[row];
          return (
            <div
              key={row}
              id={`row-${row}`}
              role="option"
              aria-selected={row === chosen}
              aria-posinset={first + i + 1}
              aria-setsize={rows.length}
              class={row === chosen ? "item chosen" : "item"}
              style={{ top: `${(first + i) * height}px` }}
              onClick={() => open(row)}
            >
              <Mark won={won} />
              <span class="what">
                <b>{index.texts.phase[e.phase[row]]} {e.step[row]}</b> task {taskOf(index, row)}
                <small>
                  return {short(e.total_reward[row])}, {e.num_turns[row]} turn{e.num_turns[row] === 1 ? "" : "s"}, {index.texts.stop_reason[e.stop_reason[row]]}
                  {e.num_sequences[row] > 1 ? `, ${e.num_sequences[row]} sequences` : ""}
                </small>
              </span>
              <span class="id">{idOf(index, row)}</span>
            </div>
          );
        })}
      </div>
      {rows.length === 0 && <p class="empty">No episode is like this.</p>}
    </div>
  );
}

export function Mark({ won }: { won: boolean | null }) {
  const [sign, name] = won === null ? ["?", "unknown"] : won ? ["✓", "success"] : ["✗", "no success"];
  return <span class={`mark ${won ? "won" : "lost"}`} role="img" aria-label={name}>{sign}</span>;
}
