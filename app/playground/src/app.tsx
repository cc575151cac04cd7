/** The page: who it speaks to, what it is given, and one view at a time. */

import { useCallback, useEffect, useErrorBoundary, useRef, useState } from "preact/hooks";

import { ApiFailure, get, sentence, setKey } from "./api/client";
import type { Capabilities, Vector, VectorPage } from "./api/types";
import { PageContext, useLinkedState, type Change } from "./state/hooks";
import { TITLES, VIEWS, type PageState, type View } from "./state/page";
import { Problem } from "./ui/parts";
import { PromptPanel } from "./ui/prompt";
import { SteeringPanel } from "./ui/steering";
import { ActivationsView } from "./views/activations";
import { AttentionView } from "./views/attention";
import { GenerateView } from "./views/generate";
import { LensView } from "./views/lens";
import { PatchingView } from "./views/patching";
import { SweepView } from "./views/sweep";

const AGAIN_MS = 2000;
const MAX_PAGES = 10;

const SHOWN: Record<View, () => preact.JSX.Element> = {
  generate: GenerateView,
  sweep: SweepView,
  lens: LensView,
  activations: ActivationsView,
  attention: AttentionView,
  patching: PatchingView,
};

export function App() {
  const [state, change] = useLinkedState();
  const [capabilities, setCapabilities] = useState<Capabilities | null>(null);
  const [vectors, setVectors] = useState<Vector[]>([]);
  const [problem, setProblem] = useState<{ text: string; asksForKey: boolean } | null>(null);
  const [vectorProblem, setVectorProblem] = useState("");
  const reloadVectors = useCallback(async () => {
    try {
      setVectors(await allVectors());
      setVectorProblem("");
    } catch (error) {
      setVectors([]);
      setVectorProblem(sentence(error));
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
      setCapabilities(found);
      setProblem(null);
      await reloadVectors();
    } catch (error) {
      if (mine !== attempt.current) return;
      const status = error instanceof ApiFailure ? error.status : 0;
      setCapabilities(null);
      setProblem({ text: sentence(error), asksForKey: status === 401 });
      if (status === 503 || status === 0) again.current = window.setTimeout(() => void connect(), AGAIN_MS);
    }
  }, [reloadVectors]);
  useEffect(() => void connect(), [connect]);
  return (
    <>
      <Header model={capabilities?.model} asksForKey={problem?.asksForKey ?? false} onKey={connect} />
      {problem && <Problem text={problem.text} />}
      {capabilities && (
        <PageContext.Provider value={{ state, change, capabilities, vectors, reloadVectors }}>
          <Tabs state={state} change={change} />
          <main class={state.view === "patching" ? "alone" : ""}>
            {state.view !== "patching" && (
              <div class="given">
                <PromptPanel />
                {state.view !== "attention" && <SteeringPanel />}
                {state.view !== "attention" && <Problem text={vectorProblem} />}
              </div>
            )}
            <Shown key={state.view} view={state.view} />
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
          <Problem text={`The page could not draw this: ${sentence(broken)}`} />
          <button type="button" onClick={startAnew}>
            Start the view anew
          </button>
        </>
      ) : (
        <Component />
      )}
    </section>
  );
}

function Header(props: { model: string | undefined; asksForKey: boolean; onKey: () => Promise<void> }) {
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
      <form class="keyform" onSubmit={use}>
        <label for="key">API key</label>
        <input
          id="key"
          type="password"
          autocomplete="off"
          placeholder={isSet ? "in use, until this page is closed" : "only where the server has keys"}
          value={text}
          aria-invalid={props.asksForKey}
          onInput={(event) => setText(event.currentTarget.value)}
        />
        <button type="submit">Use</button>
      </form>
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

async function allVectors(): Promise<Vector[]> {
  const found: Vector[] = [];
  let after = "";
  for (let number = 0; number < MAX_PAGES; number += 1) {
    const page = await get<VectorPage>(`/v1/vectors?limit=100${after}`);
    found.push(...page.data);
    if (!page.has_more || !page.last_id) break;
    after = `&after=${encodeURIComponent(page.last_id)}`;
  }
  return found.filter((vector) => vector.at === "layers.*.output");
}
