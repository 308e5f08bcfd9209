// Draws each chart of the page from the data inside it. Nothing is evaluated: Vega's expressions are interpreted.
{
  const ink = 'var(--ink)', faint = 'var(--faint)', line = 'var(--line)'
  const config = {
    background: null,
    font: 'system-ui, "DejaVu Sans", Verdana, sans-serif',
    view: { stroke: null },
    axis: {
      labelColor: faint, titleColor: faint, titleFontWeight: 'normal', labelFontSize: 12, titleFontSize: 12,
      gridColor: line, domainColor: faint, tickColor: faint, labelLimit: 300,
    },
    axisY: { titleAngle: 0, titleAlign: 'left', titleAnchor: 'end', titleX: 0, titleY: -10 },
    legend: { orient: 'bottom', labelColor: ink, labelFontSize: 12, columns: 6, symbolSize: 600, symbolStrokeWidth: 2 },
    text: { color: ink, fontSize: 12 },
  }
  const number = (field, title, more) => ({ field, type: 'quantitative', title: title || null, ...more })
  const fills = [...Array(11).keys()]
  const fill = { field: 'fill', legend: null, scale: { domain: fills, range: fills.map(i => `var(--k${i})`) } }
  const filled = { color: { ...fill, type: 'nominal' }, tooltip: { field: 'text' } }
  const dashes = [[1, 0], [7, 3], [2, 3], [10, 3, 2, 3], [4, 4], [12, 4]]

  const kinds = {
    // Curves over steps: a colour and a dash for each name; points can be hovered, and are seen where there are few.
    lines: ({ rows, names, drawn, unit, format, domain, scale }) => {
      const legend = names.length > 1 ? { title: null, symbolType: 'stroke', values: drawn } : null
      const style = range => ({ field: 'name', legend, scale: { domain: names, range: names.map(range) } })
      return {
        height: 170,
        data: { values: rows },
        encoding: {
          x: number('x', 'step', {
            axis: { format: ',d', grid: false, tickCount: Math.min(5, domain[1] - domain[0]) }, scale: { domain, nice: false },
          }),
          y: number('y', unit, { axis: { format, tickCount: 5 }, scale }),
          color: style((_, i) => `var(--l${i % 6})`),
        },
        layer: [
          {
            mark: { type: 'line', strokeWidth: 1.75 },
            encoding: { strokeDash: style((_, i) => dashes[(i + Math.floor(i / 6)) % 6]) },
          },
          {
            transform: [{ filter: 'isValid(datum.y)' }],
            mark: { type: 'point', size: 40, filled: true },
            encoding: {
              opacity: { condition: { test: 'datum.is_marked', value: 1 }, value: 0 },
              tooltip: [
                { field: 'name', title: 'curve' }, { field: 'x', title: 'step' }, { field: 'y', title: unit || 'value' },
              ],
            },
          },
        ],
      }
    },
    // Horizontal bars of parts, each with its name and a note above it.
    bars: ({ rows, notes, unit, scale, limit }) => {
      const y = { field: 'bar', type: 'nominal', sort: null, title: null, scale: { paddingInner: 0.5, paddingOuter: 0.5 } }
      const axis = { ticks: false, domain: false, labelColor: ink, labelAlign: 'left', labelBaseline: 'bottom', labelPadding: 0, labelOffset: -14 }
      const layer = [
        {
          data: { values: rows },
          mark: { type: 'bar', clip: true, stroke: 'var(--paper)' },
          encoding: {
            x: number('value', unit, { stack: 'zero', scale, axis: { tickCount: 5 } }),
            y: { ...y, axis }, order: { field: 'order' }, ...filled,
          },
        },
        {
          data: { values: notes },
          mark: { type: 'text', align: 'right', baseline: 'bottom', yOffset: -14, color: faint },
          encoding: { x: { value: { expr: 'width' } }, y, text: { field: 'note' } },
        },
      ]
      if (limit) {
        layer.push({
          data: { values: notes },
          mark: { type: 'tick', color: 'var(--bad)', thickness: 2, size: 28 },
          encoding: { x: { datum: limit, type: 'quantitative' }, y },
        })
      }
      return { height: { step: 44 }, layer }
    },
    // Columns of parts; the begin and the end of each column are given.
    columns: ({ rows, unit, x, domain }) => ({
      height: 190,
      data: { values: rows },
      transform: [{ stack: 'value', groupby: ['x'], sort: [{ field: 'order' }], as: ['y', 'y2'] }],
      mark: 'rect',
      encoding: {
        x: number('x', x, { scale: { domain, nice: false, zero: false }, axis: { grid: false, format: '.6~g', tickCount: Math.min(10, domain[1] - domain[0]) } }),
        x2: { field: 'x2' },
        y: number('y', unit, { axis: { tickCount: 5 } }),
        y2: { field: 'y2' },
        stroke: filled.color, // no gaps between columns of a fraction of a pixel
        ...filled,
      },
    }),
    // Time from left to right, a lane for each thing that is busy.
    lanes: ({ rows, lanes, unit, end, width }) => {
      const y = { field: 'lane', type: 'nominal', sort: lanes, title: null }
      const axis = unit ? { grid: false, format: '.6~g', titleAnchor: 'start' } : null
      const x = number('x', unit, { axis, scale: { domain: [0, end], nice: false } })
      return {
        width,
        height: { step: 30 },
        data: { values: rows },
        layer: [
          {
            mark: { type: 'bar', stroke: 'var(--paper)', strokeWidth: 0.5 },
            encoding: { x, x2: { field: 'x2' }, y, ...filled },
          },
          {
            transform: [{ filter: 'datum.label' }, { calculate: '(datum.x + datum.x2) / 2', as: 'middle' }],
            mark: { type: 'text', color: '#10151b' },
            encoding: { x: { ...x, field: 'middle' }, y, text: { field: 'label' }, tooltip: { field: 'text' } },
          },
        ],
      }
    },
  }

  for (const place of document.querySelectorAll('.chart')) {
    const data = JSON.parse(place.querySelector('script').textContent), held = place.querySelector('div'), words = held.textContent
    held.textContent = ''
    try {
      const autosize = { type: data.width ? 'pad' : 'fit-x', contains: 'padding' }
      const spec = { width: 'container', autosize, config, ...kinds[data.kind](data) }
      const parsed = vega.parse(vegaLite.compile(spec, { logger: vega.logger(vega.Error) }).spec, null, { ast: true })
      new vega.View(parsed, { expr: vega.expressionInterpreter, renderer: 'svg', container: held }).run()
    } catch (error) { // the other charts are drawn all the same
      held.textContent = words
      console.error(error)
    }
  }
}
