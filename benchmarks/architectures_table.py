def line(name, row):
    h=[(('sick:'+x['sick']) if x['sick'] else ('silent' if not x['incidents'] and not x['findings'] and x['same'] else f"FALSE {x['incidents']} {x['findings']} same={x['same']}")) for x in row.get('health',[])]
    p=['ok' if x['exact'] else (x['reason'] or f"WRONG {x['parameter']} truth={x['truth']} found={x['found']} {x['op']} {x['line']}") for x in row.get('plants',[])]
    return f"{name} {row.get('seconds')}s {row.get('reason','')} {row.get('stopped','')} {h} {p}"
def write(results): pass
