/** What is watched while a text is written: detectors' scores, flags, and stops that end it. */

import { nameOf } from "../lib/conditions";
import { namesOf } from "../lib/names";
import { usePage } from "../state/hooks";
import { MARK, MARKS, type MarkState } from "../state/page";
import { When } from "./conditions";
import { Check, Choice, Guide, TextField } from "./parts";
import { Where } from "./where";

const OP_NAMES: Record<(typeof MARKS)[number], string> = {
  flag: "mark the token",
  stop: "end the text",
};

export function MarksPanel() {
  const { state, change, detectors, dictionaries } = usePage();
  const { marks, watched } = state;
  const canTest = detectors.length > 0 || dictionaries.length > 0;
  const set = (index: number, part: Partial<MarkState>) =>
    change({ marks: marks.map((mark, each) => (each === index ? { ...mark, ...part } : mark)) });
  const watch = (name: string, isOn: boolean) =>
    change({ watched: isOn ? [...watched, name] : watched.filter((each) => each !== name) });
  const options = namesOf(detectors, detectors[0]?.name ?? "").filter(([name]) => name);
  const gone = watched.filter((name) => !options.some(([option]) => option === name));
  return (
    <section class="panel" aria-labelledby="marks-title">
      <h2 id="marks-title">Detectors and conditions</h2>
      {detectors.length > 0 || gone.length > 0 ? (
        <div role="group" aria-label="Scores below the text">
          {[...options, ...gone.map((name) => [name, `${name} (not here)`] as const)].map(([name, label]) => (
            <Check
              key={name}
              label={`Scores of ${label}`}
              value={watched.includes(name)}
              onChange={(isOn) => watch(name, isOn)}
            />
          ))}
        </div>
      ) : (
        <p class="hint">
          This server has no detectors yet. <code>POST /v1/detectors/train</code> trains one from labelled
          prompts. <Guide tag="detectors" />
        </p>
      )}
      {marks.map((mark, index) => (
        <Mark
          key={index}
          mark={mark}
          index={index}
          onChange={(part) => set(index, part)}
          onRemove={() => change({ marks: marks.filter((_, each) => each !== index) })}
        />
      ))}
      {canTest && (
        <div class="runbar">
          {MARKS.map((op) => (
            <button key={op} type="button" onClick={() => change({ marks: [...marks, { ...MARK, op }] })}>
              Add a {op}
            </button>
          ))}
        </div>
      )}
    </section>
  );
}

function Mark(props: {
  mark: MarkState;
  index: number;
  onChange: (part: Partial<MarkState>) => void;
  onRemove: () => void;
}) {
  const { mark, index, onChange } = props;
  const name = nameOf(mark, index);
  return (
    <fieldset class="steer">
      <legend>
        {mark.op === "flag" ? "Flag" : "Stop"}: {name}
      </legend>
      <div class="fields">
        <Choice
          label="Then"
          value={mark.op}
          options={MARKS.map((op) => [op, OP_NAMES[op]] as const)}
          onChange={(op) => onChange({ op })}
        />
        <TextField
          label="Name"
          value={mark.name}
          placeholder={name}
          onChange={(name) => onChange({ name })}
        />
      </div>
      <When scope={mark} isNeeded onChange={onChange} />
      <Where scope={mark} onChange={onChange} />
      <div class="runbar">
        <Check label="On" value={mark.on} onChange={(on) => onChange({ on })} />
        <button type="button" class="quiet" aria-label={`Remove ${name}`} onClick={props.onRemove}>
          Remove
        </button>
      </div>
    </fieldset>
  );
}
