/** Presets: one that steers, kept on the server, and the steering of the page kept as one. */

import { useCallback, useEffect, useState } from "preact/hooks";

import { get, post } from "../api/client";
import type { Models, Preset } from "../api/types";
import { isSteering, steerOps } from "../lib/steering";
import { usePage, useRun } from "../state/hooks";
import { Choice, RunBar, TextField } from "./parts";

export function Presets() {
  const { state, change, detectors } = usePage();
  const run = useRun();
  const [names, setNames] = useState<string[]>([]);
  const [name, setName] = useState("");
  const [kept, setKept] = useState("");
  const reload = useCallback(async () => setNames(await presetNames()), []);
  useEffect(() => void reload().catch(() => setNames([])), [reload]);
  const save = () =>
    run.start(async (signal) => {
      setKept("");
      const body = { name, interventions: steerOps(state, detectors) };
      const made = await post<Preset>({ path: "/v1/presets", body }, signal);
      setKept(`${made.name}, version ${made.version}, is saved.`);
      await reload();
    });
  const options = [...new Set([...names, ...(state.preset ? [state.preset] : [])])];
  return (
    <>
      {options.length > 0 && (
        <Choice
          label="Preset, applied before the steering in Compare"
          value={state.preset}
          options={[["", "none"] as const, ...options.map((option) => [option, option] as const)]}
          onChange={(preset) => change({ preset })}
        />
      )}
      {isSteering(state) && (
        <details class="training">
          <summary>Save this steering as a preset</summary>
          <TextField
            label="Preset name"
            value={name}
            hint="lower-case letters, digits and . _ -"
            onChange={setName}
          />
          <RunBar run={run} label="Save as preset" onRun={save}>
            <span class="status" role="status">
              {kept}
            </span>
          </RunBar>
        </details>
      )}
    </>
  );
}

/** Returns the presets that the caller can use: those that the list of models has, `MODEL:PRESET`. */
async function presetNames(): Promise<string[]> {
  const models = await get<Models>("/v1/models");
  return models.data.flatMap(({ id, parent }) =>
    parent && id.startsWith(`${parent}:`) ? [id.slice(parent.length + 1)] : [],
  );
}
