//! The diagnostic codes of this crate with their explain pages, ordered by id.

tessera_base::codes! {
    T0901: "the record does not begin with a start line of a known schema",
    "The first line of record.jsonl must have the kind \"start\" and a schema number. The \
schema is the version of the file's format, and this build reads one schema only. Here the \
first line is missing, has another kind, or has another schema; the message shows what was \
found.\n\n\
If the file is empty, the run ended before it wrote a line: look at the leader's log. If the \
schema is another one, another version of tessera wrote the file. The first line names that \
version; use that version to read the file. \
If somebody cut or concatenated the file, restore its first line.";

    T0902: "a line of the record cannot be read",
    "Every line of record.jsonl is one JSON object with a known kind. Only the last line may be incomplete, \
because a run that is killed may die while it writes. An unreadable line before that means that another program \
wrote to the file, that two runs shared one folder, or that the disk lost data.\n\n\
Give each run its own --out folder. To read the rest of this record, delete the named line.";

    T0903: "image size or frame rate cannot be encoded",
    "PNG allows widths and heights from 1 to 2147483647, and an animation needs a positive frame rate whose \
frame time is a fraction of two numbers up to 65535. Sizes for which the pixels of one frame do not fit \
in memory are rejected too.\n\n\
Check the width, height and fps of the run; they come from the model's config or from the command line.";

    T0904: "a frame has the wrong number of bytes",
    "A frame is width × height × 3 bytes: red, green, blue, row by row from the top, without padding. A \
decoder that returns another number was built for another size or puts channels first.\n\n\
The diagnostic names both numbers; their ratio usually shows the cause (4 channels: 4/3, one channel: 1/3).";

    T0905: "file is not a flight record",
    "A flight record is flight/rank-N.jsonl in a run's folder: a header line with a schema number, then at most 4,096 \
lines of fixed width. This file begins otherwise, or another version of tessera wrote it. The file is left out, and the autopsy treats \
its rank as a rank without a record and relies on the records of the others.\n\nA rank that died before it joined the run \
leaves no file. An empty file was created but never written, for example because the disk was full.";

    T0906: "gantt chart cannot be read",
    "Tessera reads Mermaid gantt charts with `dateFormat X` and bars of the form `name :id, start, length` in integral units, \
and charts with `dateFormat x` and bars of the form `name :id, start, 12ms`, where one millisecond of the axis is one unit: \
`tessera plan` writes this form as timeline.mmd, and Mermaid draws it to scale. A chart may also have a title, an axisFormat \
and sections. Dates, `after` and other Mermaid keywords are rejected, because a bar in the wrong \
place would change every ratio that is computed from the chart.";

    T0907: "a line of the record has a key that its schema lacks",
    "Every key of record.jsonl belongs to the schema whose number the first line gives, so that a program that reads \
the file finds a misspelt key at once and not as a value that is always absent. The message names the line and the path of each \
unknown key.\n\nAnother version of tessera or another program wrote the line. Read the record with the version that its first line names.";

    T0908: "the lines of the record contradict each other",
    "The end line counts other chunks or frames than the chunk lines, the chunk lines are not in ascending order, or \
a line follows the end line. Then lines were lost, added or exchanged after the run wrote them. As a warning, the code means that \
there is no end line: the run is in progress, or it died.\n\nCopy the folder of the run again, or use `tessera autopsy` on a run that died.";
}
