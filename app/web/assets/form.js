'use strict';
studio.screens.new = { title: 'New run', build(root) { root.append(studio.h('h1', {}, 'New run')); }, show() {} };
