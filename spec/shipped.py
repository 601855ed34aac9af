"""Grammars that can be asked for by name, in llguidance's Lark.

Small and strict rather than complete: each describes text that common readers of the format take.
`tests/spec/test_shipped.py` holds examples that fit and examples that don't. Knows no tokens.
"""

from __future__ import annotations

_DATE = r"""
YEAR: /[0-9]{4}/
MONTH: /0[1-9]|1[0-2]/
DAY: /0[1-9]|[12][0-9]|3[01]/
TIME: /([01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9]/
"""

SQL = r"""
start: "SELECT " columns " FROM " NAME where? group? order? limit? ";"?
columns: "*" | column (", " column)*
column: NAME | CALL "(" ("*" | NAME) ")"
where: " WHERE " condition ((" AND " | " OR ") condition)*
condition: NAME OPERATOR value | NAME " IS " ("NOT ")? "NULL"
group: " GROUP BY " NAME (", " NAME)*
order: " ORDER BY " NAME (" ASC" | " DESC")? (", " NAME (" ASC" | " DESC")?)*
limit: " LIMIT " /[1-9][0-9]{0,5}/
value: STRING | NUMBER
CALL: /COUNT|SUM|AVG|MIN|MAX/
OPERATOR: / (=|<>|<=|>=|<|>|LIKE) /
NAME: /[a-z_][a-z0-9_]{0,30}(\.[a-z_][a-z0-9_]{0,30})?/
STRING: /'[^'\\\n\r]{0,200}'/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,9})?/
"""

PYTHON_FUNCTION = r"""
start: "def " NAME "(" parameters? ")" returns? ":\n" docstring? line+
parameters: parameter (", " parameter)*
parameter: NAME (": " TYPE)?
returns: " -> " TYPE
docstring: "    \"\"\"" /[^"\\\n]{1,200}/ "\"\"\"\n"
line: /    {1,4}[^\s\\][^\n]{0,150}\n/
NAME: /[a-z_][a-z0-9_]{0,30}/
TYPE: /[A-Za-z_][A-Za-z0-9_.]{0,30}(\[[A-Za-z0-9_., ]{1,40}\])?( \| None)?/
"""

INI = r"""
start: section+
section: "[" KEY "]\n" entry*
entry: KEY " = " VALUE? "\n"
KEY: /[A-Za-z_][A-Za-z0-9_.\-]{0,40}/
VALUE: /[^\s;#=\[][^\n\r;#]{0,200}/
"""

TOML = r"""
start: entry* table*
table: "[" NAME ("." NAME)* "]\n" entry*
entry: NAME " = " value "\n"
value: STRING | NUMBER | "true" | "false" | DATE | "[" (value (", " value)*)? "]"
NAME: /[A-Za-z0-9_\-]{1,40}/
STRING: /"[^"\\\x00-\x1f\x7f]{0,200}"/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,9})?/
DATE: /[0-9]{4}-(0[1-9]|1[0-2])-(0[1-9]|[12][0-9]|2[0-8])/
"""

YAML = r"""
start: entry+
entry: NAME ": " value "\n" | NAME ":\n" item+
item: "  - " value "\n"
value: STRING | NUMBER | "true" | "false" | "null"
NAME: /[A-Za-z_][A-Za-z0-9_\-]{0,40}/
STRING: /"[^"\\\x00-\x1f\x7f-\x9f]{0,200}"/
NUMBER: /-?(0|[1-9][0-9]{0,17})(\.[0-9]{1,9})?/
"""

FENCED_CODE = r"""
start: "```" LANGUAGE? "\n" body "```"
body: line*
line: /[^`\n][^\n]{0,300}\n|\n/
LANGUAGE: /[a-z0-9+#\-]{1,20}/
"""

SHIPPED: dict[str, str] = {
    "sql_select": SQL,
    "python_function": PYTHON_FUNCTION,
    "ini": INI,
    "toml": TOML,
    "yaml": YAML,
    "fenced_code": FENCED_CODE,
    "date": 'start: YEAR "-" MONTH "-" DAY' + _DATE,
    "time": "start: TIME" + _DATE,
    "datetime": 'start: YEAR "-" MONTH "-" DAY "T" TIME ("Z" | /[+\\-][01][0-9]:[0-5][0-9]/)'
    + _DATE,
    "multiple_choice": "start: /[A-E]/",
}
