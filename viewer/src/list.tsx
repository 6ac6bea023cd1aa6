import { useEffect, useLayoutEffect, useRef, useState } from "preact/hooks";
import { endName, everything, idOf, phaseName, short, taskOf, type Filter, type Index } from "./data";

const height = 46;
const most = 16;

function span(values: number[]): string {
  const [low, high] = [short(Math.min(...values)), short(Math.max(...values))];
  return low === high ? low : `${low} to ${high}`;
}

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
  return (
    <form class="filters" role="search" aria-label="Filter the episodes" onSubmit={(event) => event.preventDefault()}>
      <div class="row">
        {choice("Played in", "phase", [["", "all"], ...index.texts.phase.map((p) => [p!, phaseName(p)] as [string, string])])}
        {choice("Success", "success", [["", "any"], ["true", "yes"], ["false", "no"]])}
        {choice("Ended by", "stop", [["", "any"], ...index.texts.stop_reason.map((s) => [s!, endName(s)] as [string, string])])}
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

// A row of the list has the episodes of one group.
export function List({ index, groups, chosen, open }: { index: Index; groups: number[][]; chosen: number | null; open: (row: number) => void }) {
  const box = useRef<HTMLDivElement>(null);
  const [top, setTop] = useState(0);
  const [size, setSize] = useState(600);
  const at = chosen === null ? -1 : groups.findIndex((rows) => rows.includes(chosen));
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
  const last = Math.min(groups.length, Math.ceil((top + size) / height) + 5);
  const e = index.episodes;
  const key = (event: KeyboardEvent) => {
    const page = Math.max(1, Math.floor(size / height) - 1);
    const moves: Record<string, number> = { ArrowDown: at + 1, ArrowUp: at - 1, PageDown: at + page, PageUp: at - page, Home: 0, End: groups.length - 1 };
    if (!(event.key in moves) || !groups.length) return;
    event.preventDefault();
    open(groups[Math.min(groups.length - 1, Math.max(0, moves[event.key]))][0]);
  };
  return (
    <div
      class="list"
      ref={box}
      role="listbox"
      tabIndex={0}
      aria-label="Episodes"
      aria-activedescendant={at >= 0 ? `row-${at}` : undefined}
      onScroll={(event) => setTop(event.currentTarget.scrollTop)}
      onKeyDown={key}
    >
      <div style={{ height: `${groups.length * height}px` }}>
        {groups.slice(first, last).map((rows, i) => {
          const row = rows[0];
          const place = first + i;
          return (
            <div
              key={idOf(index, row)}
              id={`row-${place}`}
              role="option"
              aria-selected={place === at}
              aria-posinset={place + 1}
              aria-setsize={groups.length}
              class={place === at ? "item chosen" : "item"}
              style={{ top: `${place * height}px` }}
              onClick={() => open(row)}
            >
              <span class="what">
                <b>{phaseName(index.texts.phase[e.phase[row]])}</b>, step {e.step[row]}
                <small>task {taskOf(index, row)}, return {span(rows.map((r) => e.total_reward[r]))}, turns {span(rows.map((r) => e.num_turns[r]))}</small>
              </span>
              <span class="marks">
                {rows.length > most
                  ? `${rows.filter((r) => e.success[r]).length} of ${rows.length}`
                  : rows.map((r) => (
                      <span key={r} class={r === chosen ? "on" : ""} title={`Episode ${e.member[r] + 1}`} onClick={(event) => (event.stopPropagation(), open(r))}>
                        <Mark won={e.success[r]} />
                      </span>
                    ))}
              </span>
            </div>
          );
        })}
      </div>
      {groups.length === 0 && <p class="empty">No episode is like this.</p>}
    </div>
  );
}

export function Mark({ won }: { won: boolean | null }) {
  const [sign, name] = won === null ? ["?", "unknown"] : won ? ["✓", "success"] : ["✗", "no success"];
  return <span class={`mark ${won ? "won" : "lost"}`} role="img" aria-label={name}>{sign}</span>;
}
