// Types that several scripts share; `tsc` reads them (make check), browsers never.

/** Tag of an element that `h` makes: "button" of "button.btn#start". */
type TagOf<Kind extends string> = Kind extends `${infer Tag}.${string}`
  ? TagOf<Tag>
  : Kind extends `${infer Tag}#${string}` ? Tag : Kind;

/** The element that `h` makes of "button.btn#start". */
export type ElementOf<Kind extends string> = TagOf<Kind> extends keyof HTMLElementTagNameMap
  ? HTMLElementTagNameMap[TagOf<Kind>]
  : HTMLElement;

/** What `h` takes as a child: text is never read as HTML; null, undefined and false are left out. */
export type Child = Node | string | number | null | undefined | false | Child[];

/** JSON that a function of `pages/` returns; its docstring says what is in it. */
export type Answer = any;

/** The parts of an address: ["runs", "NAME", "samples"]. */
export type Place = string[];

/** A screen, built when it is first shown. */
export interface Screen {
  title: string;
  /** Its link in the rail: the key after "g", and the path of the icon. */
  rail?: { key: string; icon: string };
  build(section: HTMLElement): void;
  show(place: Place): unknown;
  /** Called every two seconds while it is shown. */
  tick?(place: Place): unknown;
}

/** A tab of the screen of a run. `show` is given the name of the run. */
export interface Tab {
  build(panel: HTMLElement): void;
  show(run: string): unknown;
  tick(run: string): unknown;
}

export interface Shortcut {
  /** What a person presses: "g r", "Ctrl Enter", "?". */
  keys: string;
  text: string;
  /** Returns false to leave the key to the browser. */
  action: (event: KeyboardEvent) => unknown;
  /** Name of the only screen that has it, or of a tab of one ("run samples"); "" for all. */
  screen: string;
}

/** A field of the config, as `form_answers.facts` describes it. */
export interface Field {
  label: string;
  help: string;
  /** Help on a card, and the same for texts; empty where it is `help`. */
  help_on_card: [string, string];
  unit: string;
  kind: 'switch' | 'choice' | 'text' | 'lines' | 'yaml';
  number: '' | 'int' | 'float';
  path: '' | 'file' | 'folder' | 'model' | 'template';
  min: number | null;
  max: number | null;
  suggested: string[];
  columns: (Field & { key: string; default: unknown; is_list: boolean; is_switch: boolean })[];
  group: string;
  is_front: boolean;
  /** Words by which the search finds it. */
  words: string;
}

/** What the server says once, in the page itself: `server.facts`. */
export interface Facts {
  /** {word in lower case: what it means} */
  glossary: Record<string, string>;
  /** Why nothing can be written; "" where it can. */
  unwritable: string;
  form: {
    fields: Record<string, Field>;
    groups: Record<string, string>;
    /** [name, title, what it is] of each adapter. */
    methods: [string, string, string][];
    targets: string[];
    this_machine: string;
    /** {why there is no field: keys of other trainers, separated by spaces} */
    missing_words: Record<string, string>;
  };
  rehearsal: { seconds: number; help: string };
  run: { charts: { title: string; ylabel: string }[]; units: Record<string, string> };
  upload: { head: number; chunk: number; accept: string };
}

/** What the lightbox shows: one of `src`, `load`, `written` and `played`. */
export interface LightboxItem {
  title: string;
  text?: string;
  /** Address of the image, or of the poster of what is played. */
  src?: string | null;
  /** Returns the address later, or null. */
  load?: () => Promise<string | null>;
  /** A sample that is a text. */
  written?: string;
  /** A sample with a duration. */
  played?: { src: string; type: string };
}

declare global {
  // Whoever writes a selector knows what it finds.
  interface ParentNode {
    querySelector(selectors: string): any;
    querySelectorAll(selectors: string): NodeListOf<any>;
  }
}
