// The screen Toy: a greeting.
import { h, say, call, screens } from './core.js';

let root = null;

screens.toy = {
  rail: { key: 'y', icon: 'M4 4h12v12H4z' },
  title: 'Toy',
  build(section) {
    root = section;
    root.append(h('h1', {}, 'Toy'), h('input#toy-name', { 'aria-label': 'Whom to greet' }), h('p#toy-greeting', { role: 'status' }),
      h('button.btn', { type: 'button', onclick: async () => say(root.querySelector('#toy-greeting'), await call('toy_greeting', { name: root.querySelector('#toy-name').value })) }, 'Greet'));
  },
  show() { root.querySelector('#toy-name').focus(); },
};
