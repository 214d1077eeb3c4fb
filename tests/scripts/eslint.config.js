// Lint of app/web/assets: mistakes, and what may become code or HTML. Types are checked by tsc.
import js from '@eslint/js';
import globals from 'globals';

export default [
  js.configs.recommended,
  {
    files: ['**/*.js'],
    languageOptions: { ecmaVersion: 2024, sourceType: 'module', globals: globals.browser },
    linterOptions: { reportUnusedDisableDirectives: 'error' },
    rules: {
      'max-len': ['error', { code: 120 }],
      'max-lines': ['error', { max: 400 }],
      'no-unused-vars': ['error', { caughtErrors: 'none', destructuredArrayIgnorePattern: '^_', argsIgnorePattern: '^_' }],
      'no-empty': ['error', { allowEmptyCatch: true }],
      'no-var': 'error',
      'prefer-const': ['error', { destructuring: 'all' }],
      eqeqeq: 'error',
      'no-eval': 'error',
      'no-implied-eval': 'error',
      'no-new-func': 'error',
      'no-script-url': 'error',
      'no-restricted-properties': ['error',
        { property: 'innerHTML', message: 'A text would become HTML: make elements by h().' },
        { property: 'outerHTML', message: 'A text would become HTML: make elements by h().' },
        { property: 'insertAdjacentHTML', message: 'A text would become HTML: make elements by h().' }],
      'no-restricted-imports': ['error', { patterns: [{ regex: '^(?!\\./)', message: 'Scripts import each other only.' }] }],
      'no-throw-literal': 'error',
      quotes: ['error', 'single', { avoidEscape: true, allowTemplateLiterals: true }],
      semi: 'error',
      'no-trailing-spaces': 'error',
      'eol-last': 'error',
    },
  },
  { files: ['**/charts.js'], rules: { 'max-lines': ['error', { max: 520 }] } }, // chart() is one function of 400 lines
];
