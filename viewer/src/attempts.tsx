import { useEffect, useState } from "preact/hooks";
import { Action, Observation, Reward } from "./conversation";
import { attempts, endName, phaseName, readEpisode, signed, type Episode, type Index } from "./data";
import { Mark } from "./list";

const most = 16;

export function Attempts({ index, row, open }: { index: Index; row: number; open: (row: number) => void }) {
  const all = attempts(index, row);
  const rows = all.slice(0, most);
  const [episodes, setEpisodes] = useState<Episode[]>([]);
  useEffect(() => {
    let wanted = true;
    Promise.all(rows.map((other) => readEpisode(index, other))).then((found) => wanted && setEpisodes(found));
    return () => {
      wanted = false;
    };
  }, [rows.join()]);
  const e = index.episodes;
  const own = all.filter((other) => e.group[other] === e.group[row] && e.phase[other] === e.phase[row] && e.step[other] === e.step[row]);
  const turns = Math.max(0, ...episodes.map((episode) => episode.turns.length));
  return (
    <div class="attempts">
      <p class="soft">
        {own.length} episode{own.length === 1 ? "" : "s"} of this task{all.length > own.length ? `, and ${all.length - own.length} of other steps` : ""}{all.length > most ? `; the first ${most} are shown` : ""}.
      </p>
      <div class="scroll" tabIndex={0} role="region" aria-label="Attempts side by side">
        <table>
          <thead>
            <tr>
              <th scope="col">Turn</th>
              {rows.map((other) => (
                <th scope="col" key={other} class={other === row ? "chosen" : ""}>
                  <button type="button" class="link" onClick={() => open(other)}>
                    <Mark won={e.success[other]} /> {own.includes(other) ? "" : `${phaseName(index.texts.phase[e.phase[other]])}, step ${e.step[other]}, `}Episode {e.member[other] + 1}
                  </button>
                  <small>return {signed(e.total_reward[other])}, outcome {signed(e.outcome[other])}, ended by {endName(index.texts.stop_reason[e.stop_reason[other]])}</small>
                </th>
              ))}
            </tr>
          </thead>
          <tbody>
            {Array.from({ length: turns }, (_, k) => (
              <tr key={k}>
                <th scope="row">{k + 1}</th>
                {episodes.map((episode) => {
                  const turn = episode.turns[k];
                  return (
                    <td key={episode.row} class={episode.row === row ? "chosen" : ""}>
                      {turn && (
                        <>
                          <div class={`said ${turn.role}`}><Observation role={turn.role} text={turn.observation} open={false} /></div>
                          <div class="said assistant"><Action turn={turn} open={false} /></div>
                          <Reward value={turn.reward} />
                        </>
                      )}
                    </td>
                  );
                })}
              </tr>
            ))}
          </tbody>
        </table>
      </div>
    </div>
  );
}
