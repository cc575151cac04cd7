/** The page: who it speaks to, what it is given, and one view at a time. */

import { useCallback, useEffect, useErrorBoundary, useRef, useState } from "preact/hooks";

import { ApiFailure, get, listed, sentence, setKey } from "./api/client";
import type { Capabilities, Detector, Dictionary, Vector } from "./api/types";
import { steeringBy } from "./lib/steering";
import { IS_FIRST_VISIT, PageContext, useLinkedState, type Change } from "./state/hooks";
import { TITLES, VIEWS, type PageState, type View } from "./state/page";
import { Problem } from "./ui/parts";
import { MarksPanel } from "./ui/marks";
import { PromptPanel } from "./ui/prompt";
import { SteeringPanel } from "./ui/steering";
import { ActivationsView } from "./views/activations";
import { AttentionView } from "./views/attention";
import { FeaturesView } from "./views/features";
import { GenerateView } from "./views/generate";
import { LensView } from "./views/lens";
import { PatchingView } from "./views/patching";
import { SweepView } from "./views/sweep";

const AGAIN_MS = 2000;
/** How often a first visit looks for the examples, which a server stores beside its first requests. */
const MAX_LOOKS = 3;

interface AllStored {
  vectors: Vector[];
  detectors: Detector[];
  dictionaries: Dictionary[];
}

const NOTHING: AllStored = { vectors: [], detectors: [], dictionaries: [] };

const SHOWN: Record<View, () => preact.JSX.Element> = {
  generate: GenerateView,
  sweep: SweepView,
  lens: LensView,
  activations: ActivationsView,
  features: FeaturesView,
  attention: AttentionView,
  patching: PatchingView,
};

export function App() {
  const [state, change] = useLinkedState();
  const [capabilities, setCapabilities] = useState<Capabilities | null>(null);
  const [stored, setStored] = useState(NOTHING);
  const [problem, setProblem] = useState<ApiFailure | null>(null);
  const [needsKey, setNeedsKey] = useState(false);
  const [storedProblem, setStoredProblem] = useState("");
  const reloadStored = useCallback(async () => {
    try {
      setStored(await allStored());
      setStoredProblem("");
    } catch (error) {
      setStored(NOTHING);
      setStoredProblem(sentence(error));
    }
  }, []);
  const again = useRef(0);
  const attempt = useRef(0);
  const connect = useCallback(async () => {
    // The latest one alone goes on: with each key that is tried there comes another.
    clearTimeout(again.current);
    const mine = ++attempt.current;
    try {
      const found = await get<Capabilities>("/v1/capabilities");
      if (mine !== attempt.current) return;
      await reloadStored();
      if (mine !== attempt.current) return;
      setCapabilities(found);
      setProblem(null);
    } catch (error) {
      if (mine !== attempt.current) return;
      const failure = error instanceof ApiFailure ? error : new ApiFailure(sentence(error), "page_error", 0);
      setCapabilities(null);
      setProblem(failure);
      if (failure.status === 401) setNeedsKey(true);
      if (failure.isPassing) again.current = window.setTimeout(() => void connect(), AGAIN_MS);
    }
  }, [reloadStored]);
  useEffect(() => void connect(), [connect]);
  const model = capabilities?.model;
  const looksLeft = useRef(IS_FIRST_VISIT ? MAX_LOOKS : 0);
  useEffect(() => {
    if (!model || !looksLeft.current) return;
    const example = exampleOf(stored.vectors, model);
    if (example) {
      looksLeft.current = 0;
      if (!state.steering.length) change({ steering: [steeringBy(example)] });
      return;
    }
    looksLeft.current -= 1;
    const timer = setTimeout(() => void reloadStored(), AGAIN_MS);
    return () => clearTimeout(timer);
  }, [stored, model]);
  const ours = {
    vectors: stored.vectors,
    detectors: stored.detectors.filter((each) => each.model === model),
    dictionaries: stored.dictionaries.filter((each) => each.model === model),
  };
  return (
    <>
      <Header model={model} needsKey={needsKey} isRefused={problem?.status === 401} onKey={connect} />
      {problem && (
        <>
          <Problem text={problem.message} />
          {problem.isPassing && (
            <button type="button" class="retry" onClick={() => void connect()}>
              Retry
            </button>
          )}
        </>
      )}
      {capabilities && (
        <PageContext.Provider value={{ state, change, capabilities, ...ours, reloadStored }}>
          <Tabs state={state} change={change} />
          <main class={state.view === "patching" ? "alone" : ""}>
            {state.view !== "patching" && <PromptPanel />}
            <Shown key={state.view} view={state.view} />
            {state.view !== "patching" && state.view !== "attention" && (
              <div class="given">
                <SteeringPanel />
                {state.view === "generate" && <MarksPanel />}
                <Problem text={storedProblem} />
              </div>
            )}
          </main>
        </PageContext.Provider>
      )}
    </>
  );
}

function Shown(props: { view: View }) {
  const Component = SHOWN[props.view];
  const [broken, startAnew] = useErrorBoundary((error) => console.error(error));
  return (
    <section class="view panel" aria-labelledby="view-title">
      <h2 id="view-title">{TITLES[props.view]}</h2>
      {broken ? (
        <>
          <Problem text={`The page could not draw this view: ${sentence(broken)}`} />
          <button type="button" onClick={startAnew}>
            Reset the view
          </button>
        </>
      ) : (
        <Component />
      )}
    </section>
  );
}

function Header(props: {
  model: string | undefined;
  needsKey: boolean;
  isRefused: boolean;
  onKey: () => Promise<void>;
}) {
  const [text, setText] = useState("");
  const [isSet, setIsSet] = useState(false);
  const use = (event: Event) => {
    event.preventDefault();
    setKey(text);
    setText("");
    setIsSet(text.trim() !== "");
    void props.onKey();
  };
  return (
    <header>
      <div class="title">
        <h1>NNsight Engine</h1>
        <p>{props.model ?? "not connected"}</p>
      </div>
      {props.needsKey && (
        <form class="keyform" onSubmit={use}>
          <label for="key">API key</label>
          <input
            id="key"
            type="password"
            autocomplete="off"
            placeholder={isSet ? "in use until this page is closed" : ""}
            value={text}
            aria-invalid={props.isRefused}
            onInput={(event) => setText(event.currentTarget.value)}
          />
          <button type="submit">Use</button>
        </form>
      )}
    </header>
  );
}

function Tabs(props: { state: PageState; change: Change }) {
  const bar = useRef<HTMLElement>(null);
  useEffect(() => {
    // On a phone they do not all fit.
    bar.current?.querySelector("[aria-current]")?.scrollIntoView({ inline: "nearest", block: "nearest" });
  }, [props.state.view]);
  return (
    <nav ref={bar} aria-label="Views">
      {VIEWS.map((view) => (
        <button
          key={view}
          type="button"
          aria-current={props.state.view === view ? "page" : undefined}
          onClick={() => props.change({ view })}
        >
          {TITLES[view]}
        </button>
      ))}
    </nav>
  );
}

/** Returns what a first visit steers with: a vector for everyone, one of joy if there is one. */
function exampleOf(vectors: Vector[], model: string | undefined): Vector | undefined {
  const shared = vectors.filter((vector) => vector.shared && vector.model === model);
  return shared.find((vector) => ["example-joy", "joy"].includes(vector.name)) ?? shared[0];
}

async function allStored(): Promise<AllStored> {
  const [vectors, detectors, dictionaries] = await Promise.all([
    listed<Vector>("/v1/vectors"),
    listed<Detector>("/v1/detectors"),
    listed<Dictionary>("/v1/dictionaries"),
  ]);
  return { vectors: vectors.filter((vector) => vector.at === "layers.*.output"), detectors, dictionaries };
}
