import { Component, render, type ComponentChildren } from "preact";
import { useCallback, useEffect, useMemo, useRef, useState } from "preact/hooks";
import { Attempts } from "./attempts";
import { Conversation } from "./conversation";
import { endName, everything, groupsOf, idOf, opening, readEpisode, readIndex, select, signed, taskOf, titleOf, type Episode, type Filter, type Index } from "./data";
import { Filters, List, Mark } from "./list";
import { Header, Summary } from "./summary";
import { Tokens } from "./tokens";
import "./style.css";

const views = ["conversation", "tokens", "attempts"] as const;
type View = (typeof views)[number];

// The place in the page is part of its address: #summary, #episodes, #tokens=train-1-0-0.
function place(): [string, string] {
  const [tab, id] = decodeURIComponent(location.hash.slice(1)).split("=");
  return [tab || "summary", id ?? ""];
}

function startTheme(): string {
  try {
    const kept = localStorage.getItem("gspo-theme");
    if (kept === "dark" || kept === "light") return kept;
  } catch {
    // a page from disk may have no storage
  }
  return matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
}

function App({ index }: { index: Index }) {
  const [[tab, id], setPlace] = useState(place());
  const [filter, setFilter] = useState<Filter>(everything);
  const [theme, setTheme] = useState(startTheme());
  const [help, setHelp] = useState(false);
  const began = useRef(0);

  const groups = useMemo(() => groupsOf(index, select(index, filter)), [index, filter]);
  const rows = useMemo(() => groups.flat(), [groups]);
  const start = useMemo(() => opening(index), [index]);
  const byId = useMemo(() => new Map(index.episodes.step.map((_, row) => [idOf(index, row), row])), [index]);
  const chosen = byId.get(id) ?? null;
  const view: View = (views as readonly string[]).includes(tab) ? (tab as View) : "conversation";
  const listed = tab !== "summary";

  useEffect(() => {
    const read = () => setPlace(place());
    addEventListener("hashchange", read);
    return () => removeEventListener("hashchange", read);
  }, []);
  useEffect(() => {
    document.documentElement.dataset.theme = theme;
    try {
      localStorage.setItem("gspo-theme", theme);
    } catch {
      // see above
    }
  }, [theme]);
  useEffect(() => {
    if (began.current) document.documentElement.dataset.filterMs = (performance.now() - began.current).toFixed(1);
    began.current = 0;
  }, [rows]);

  const go = (hash: string) => {
    if (location.hash === `#${hash}`) return;
    history.replaceState(null, "", `#${hash}`);
    setPlace(place());
  };
  const open = useCallback((row: number) => go(`${(views as readonly string[]).includes(place()[0]) ? place()[0] : "conversation"}=${idOf(index, row)}`), [index]);
  const change = (next: Filter) => {
    began.current = performance.now();
    setFilter(next);
  };
  const move = (by: number) => {
    const at = chosen === null ? -1 : rows.indexOf(chosen);
    if (rows.length) open(rows[Math.max(0, Math.min(rows.length - 1, at + by))]);
  };

  useEffect(() => {
    const key = (event: KeyboardEvent) => {
      const target = event.target as HTMLElement;
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      if (target.matches("input, select, textarea")) {
        if (event.key === "Escape") target.blur();
        return;
      }
      const actions: Record<string, () => void> = {
        j: () => move(1),
        k: () => move(-1),
        s: () => go("summary"),
        e: () => go(id ? `conversation=${id}` : "episodes"),
        1: () => chosen !== null && go(`conversation=${id}`),
        2: () => chosen !== null && go(`tokens=${id}`),
        3: () => chosen !== null && go(`attempts=${id}`),
        t: () => setTheme(theme === "dark" ? "light" : "dark"),
        "/": () => {
          go(id ? `conversation=${id}` : "episodes");
          requestAnimationFrame(() => document.getElementById("search")?.focus());
        },
        "?": () => setHelp(!help),
        Escape: () => (help ? setHelp(false) : go("episodes")),
      };
      if (!(event.key in actions)) return;
      event.preventDefault();
      actions[event.key]();
    };
    addEventListener("keydown", key);
    return () => removeEventListener("keydown", key);
  });

  return (
    <>
      <header>
        <h1>{index.run.name}</h1>
        <nav aria-label="Views">
          <a href="#summary" aria-current={!listed ? "page" : undefined}>Summary</a>
          <a href={start === "summary" ? "#episodes" : `#${start}`} aria-current={listed ? "page" : undefined}>Episodes</a>
        </nav>
        <button type="button" class="icon" aria-label="Keys" aria-expanded={help} onClick={() => setHelp(!help)}>?</button>
        <button type="button" class="icon" id="theme" aria-label={`Change to ${theme === "dark" ? "light" : "dark"} colours`} onClick={() => setTheme(theme === "dark" ? "light" : "dark")}>
          {theme === "dark" ? "☀" : "☾"}
        </button>
      </header>
      <Header index={index} />
      {help && <Keys />}
      {!listed ? (
        <Summary index={index} theme={theme} />
      ) : (
        <div class={chosen === null ? "split" : "split opened"}>
          <aside>
            <Filters index={index} filter={filter} change={change} count={rows.length} />
            <List index={index} groups={groups} chosen={chosen} open={open} />
          </aside>
          <main tabIndex={-1}>
            {chosen === null ? (
              <p class="empty">{id ? `The page has no episode ${id}.` : "Select a task on the left, or press j."}</p>
            ) : (
              <Detail index={index} row={chosen} view={view} go={go} open={open} filter={(task) => change({ ...everything, task })} />
            )}
          </main>
        </div>
      )}
    </>
  );
}

function Keys() {
  const keys: [string, string][] = [["j k", "next, previous episode"], ["1 2 3", "conversation, tokens, side by side"], ["/", "search a task"], ["s e", "summary, episodes"], ["t", "dark or light"], ["← →", "from token to token, in the tokens"], ["Esc", "back to the list"]];
  return (
    <dl class="keys">
      {keys.map(([name, what]) => (
        <div key={name}>
          <dt>{name.split(" ").map((key) => <kbd key={key}>{key}</kbd>)}</dt>
          <dd>{what}</dd>
        </div>
      ))}
    </dl>
  );
}

function Detail({ index, row, view, go, open, filter }: { index: Index; row: number; view: View; go: (hash: string) => void; open: (row: number) => void; filter: (task: string) => void }) {
  const [episode, setEpisode] = useState<Episode | null>(null);
  const [problem, setProblem] = useState("");
  const e = index.episodes;
  const id = idOf(index, row);
  useEffect(() => {
    let wanted = true;
    readEpisode(index, row).then(
      (found) => wanted && (setEpisode(found), setProblem("")),
      (error) => wanted && setProblem(String(error)),
    );
    return () => {
      wanted = false;
    };
  }, [id, index.blocks[e.block[row]]]);
  const ready = episode !== null && episode.row === row;
  return (
    <>
      <div class="head">
        <button type="button" class="back" onClick={() => go("episodes")}>← Episodes</button>
        <h2>
          <Mark won={e.success[row]} /> {titleOf(index, row)} <small>{id}</small>
        </h2>
        <p class="soft">
          {index.texts.env[e.env[row]]}, <button type="button" class="link" onClick={() => filter(String(e.seed[row]))}>all episodes of task {taskOf(index, row)}</button>
          {" "}· return {signed(e.total_reward[row])} · outcome {signed(e.outcome[row])} · {e.num_turns[row]} {e.num_turns[row] === 1 ? "turn" : "turns"} · {e.tokens[row]} sampled tokens · ended by {endName(index.texts.stop_reason[e.stop_reason[row]])}
          {e.num_sequences[row] > 1 ? ` · ${e.num_sequences[row]} token sequences` : ""} · {e.trained[row] ? "trained on" : "not trained on"}
        </p>
        <div role="tablist" aria-label="The episode">
          {views.map((name) => (
            <button key={name} type="button" role="tab" aria-selected={view === name} onClick={() => go(`${name}=${id}`)}>
              {name === "attempts" ? "Side by side" : name[0].toUpperCase() + name.slice(1)}
            </button>
          ))}
        </div>
      </div>
      {problem ? (
        <p class="empty" role="alert">The episode cannot be read: {problem}</p>
      ) : !ready ? (
        <p class="empty">Reading…</p>
      ) : (
        <div role="tabpanel" aria-label={view}>
          {view === "conversation" && <Conversation key={id} index={index} episode={episode} />}
          {view === "tokens" && <Tokens key={id} index={index} episode={episode} />}
          {view === "attempts" && <Attempts index={index} row={row} open={open} />}
        </div>
      )}
    </>
  );
}

class Guard extends Component<{ children: ComponentChildren }, { error: string }> {
  state = { error: "" };
  componentDidCatch(error: unknown) {
    this.setState({ error: String(error) });
  }
  render() {
    return this.state.error ? <p class="empty" role="alert">The page failed: {this.state.error}</p> : this.props.children;
  }
}

const root = document.getElementById("app")!;
document.documentElement.dataset.theme = startTheme();
readIndex().then(
  (index) => {
    root.textContent = "";
    document.title = `${index.run.name} · gspo_env`;
    if (!location.hash) history.replaceState(null, "", `#${opening(index)}`);
    render(<Guard><App index={index} /></Guard>, root);
    document.documentElement.dataset.ready = performance.now().toFixed(0);
  },
  (error) => {
    root.textContent = `The data of this page cannot be read: ${error}. It needs a browser of 2023 or later.`;
  },
);
