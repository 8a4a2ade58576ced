//! `cargo xtask bench overhead`.

use std::collections::HashMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::bench::{OverheadBench, OverheadResult, Spread, Way, median, overhead};
use serde_json::{Value, json};

use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::tree;

#[derive(Debug, Args)]
pub struct OverheadArguments {
    #[command(flatten)]
    common: Common,
    /// Records
    #[arg(long, default_value_t = 100_000)]
    keys: u64,
    /// Bytes of each
    #[arg(long, default_value_t = 100)]
    value_bytes: usize,
    /// Shares of writes
    #[arg(long, value_delimiter = ',', default_value = "0.5,0.1")]
    writes: Vec<f64>,
    /// Connections
    #[arg(long, default_value_t = 32)]
    connections: usize,
    /// Requests a second of the steady load
    #[arg(long, default_value_t = 2000.0)]
    rate: f64,
    /// Milliseconds between two checkpoints or images
    #[arg(long, default_value_t = 100)]
    interval_ms: u64,
    /// Milliseconds between two checkpoints or images of the second table
    #[arg(long, value_delimiter = ',', default_value = "50,200,500,2000")]
    intervals_ms: Vec<u64>,
    /// Seconds measured for each load
    #[arg(long, default_value_t = 1.0)]
    seconds: f64,
    /// How often everything is measured, in turns
    #[arg(long, default_value_t = 20)]
    rounds: usize,
    /// Measures nothing: makes tables and plots of what an earlier run with the same arguments has
    /// left
    #[arg(long, value_name = "OVERHEAD.JSON")]
    from: Option<PathBuf>,
}

impl OverheadArguments {
    pub fn with(common: Common) -> OverheadArguments {
        OverheadArguments {
            common,
            keys: 100_000,
            value_bytes: 100,
            writes: vec![0.5, 0.1],
            connections: 32,
            rate: 2000.0,
            interval_ms: 100,
            intervals_ms: vec![50, 200, 500, 2000],
            seconds: 1.0,
            rounds: 20,
            from: None,
        }
    }

    /// What a short run leaves out.
    fn shortened(&self) -> OverheadArguments {
        let mut short = OverheadArguments::with(self.common.clone());
        (short.keys, short.connections, short.seconds, short.rounds) = (1000, 4, 0.2, 1);
        (short.writes, short.intervals_ms) = (vec![0.5], vec![]);
        short
    }

    fn bench(&self, way: Way, tools: &Tools) -> OverheadBench {
        OverheadBench {
            way,
            hotspare: tools.hotspare.clone(),
            criu: tools.criu.as_ref().cloned().unwrap_or_default(),
            keys: self.keys,
            value_bytes: self.value_bytes,
            writes: self.writes.clone(),
            connections: self.connections,
            rate_per_s: self.rate,
            interval: Duration::from_millis(self.interval_ms),
            length: Duration::from_secs_f64(self.seconds),
        }
    }
}

/// One of each kind.
const SHORT: [Way; 6] =
    [Way::Unprotected, Way::Timeline, Way::ReplicaWait, Way::AofEverysec, Way::BgSave, Way::Criu];

/// What is measured with.
struct Tools {
    hotspare: PathBuf,
    /// Or why there is none.
    criu: Result<PathBuf, String>,
}

/// What one way has met: one result for each round.
struct Row {
    way: Way,
    interval_ms: u64,
    rounds: Vec<OverheadResult>,
    /// Replies a second of the unprotected Redis of these rounds.
    alone: Vec<f64>,
}

impl Row {
    fn median(&self, of: fn(&OverheadResult) -> f64) -> f64 {
        median(self.rounds.iter().map(of).collect())
    }

    /// Part of what the unprotected Redis answered.
    fn kept(&self) -> f64 {
        self.replies() / median(self.alone.clone())
    }

    fn replies(&self) -> f64 {
        self.median(|round| round.replies_per_s)
    }
}

/// Measures all ways in turns and shows them side by side.
pub fn overheads(arguments: &OverheadArguments) -> Result<()> {
    let shortened = arguments.common.quick.then(|| arguments.shortened());
    let arguments = shortened.as_ref().unwrap_or(arguments);
    ensure!(arguments.common.against.is_none(), "bench overhead compares with peers, not commits");
    let mut report = Report::new("overhead", &arguments.common)?;
    let tools = Tools { hotspare: tree::build_hotspare()?, criu: criu(&arguments.common) };
    let mut text = String::new();
    let ways = if arguments.common.quick { &SHORT[..] } else { &Way::ALL[..] };
    let (mut rows, intervals) = match &arguments.from {
        Some(path) => earlier(path, &mut text)?,
        None => (
            side_by_side(
                arguments,
                &tools,
                ways,
                arguments.interval_ms,
                ("overhead", 0.5),
                &mut report,
            )?,
            over_intervals(arguments, &tools, &mut report)?,
        ),
    };
    let rounds = |rows: &[Row]| rows.first().map_or(0, |row| row.rounds.len());
    text.insert_str(0, &wrapped(&about(arguments, rounds(&rows))));
    for (number, &writes) in arguments.writes.iter().enumerate() {
        println!("\n{:.0} % writes", writes * 100.0);
        let mut table = Table::new(&COLUMNS);
        for row in rows.iter().filter(|row| row.rounds[0].writes == writes) {
            table.row(cells(row));
        }
        let heading =
            format!("{:.0} % reads, {:.0} % writes", (1.0 - writes) * 100.0, writes * 1e2);
        text.push_str(&format!("\n**{heading}**\n\n{}", table.text));
        if number == 0 {
            text.push_str(&skipped(&tools));
        }
    }
    if !intervals.is_empty() {
        text.push_str(&interval_text(arguments, &intervals));
        report.plot(plot(&intervals));
    }
    text.push_str(PUBLISHED);
    rows.extend(intervals);
    for row in &rows {
        let of =
            json!({ "way": row.way.name(), "interval_ms": row.interval_ms, "alone": row.alone });
        report.add(of, &row.rounds)?;
    }
    report.finish("overhead", &text)
}

/// The rows of both tables from a file that a run has left, and where they come from.
fn earlier(path: &Path, text: &mut String) -> Result<(Vec<Row>, Vec<Row>)> {
    let file = fs::read_to_string(path).with_context(|| format!("read {}", path.display()))?;
    let file: Value = serde_json::from_str(&file).context("read JSON")?;
    let about = &file["about"];
    let word = |name: &str| about[name].as_str().unwrap_or_default().to_owned();
    text.push_str(&wrapped(&format!(
        "The figures are those of {}, commit {}, load average {} before it began, `{}`.",
        word("date"),
        word("commit"),
        about["load"],
        word("command")
    )));
    let mut rows = Vec::new();
    for result in file["results"].as_array().context("it has no results")? {
        let (of, name) = (&result["of"], result["of"]["way"].as_str().unwrap_or_default());
        let way = Way::ALL.into_iter().find(|way| way.name() == name).context("unknown way")?;
        let interval_ms = of["interval_ms"].as_u64().context("no interval")?;
        let rounds: Vec<OverheadResult> = serde_json::from_value(result["measured"].clone())
            .with_context(|| format!("read the rounds of {name}"))?;
        ensure!(!rounds.is_empty(), "no rounds of {name}");
        rows.push(Row { way, interval_ms, rounds, alone: vec![] });
    }
    let (mut first, mut second): (Vec<Row>, Vec<Row>) =
        rows.into_iter().partition(|row| row.rounds[0].steady_ms.count > 0);
    for table in [&mut first, &mut second] {
        let place = |row: &Row| (row.interval_ms, row.rounds[0].writes.to_bits());
        let alone: HashMap<_, Vec<f64>> = table
            .iter()
            .filter(|row| row.way == Way::Unprotected)
            .map(|row| (place(row), row.rounds.iter().map(|one| one.replies_per_s).collect()))
            .collect();
        for row in table.iter_mut() {
            row.alone = alone.get(&place(row)).cloned().context("no unprotected Redis")?;
        }
    }
    Ok((first, second))
}

fn about(arguments: &OverheadArguments, rounds: usize) -> String {
    format!(
        "Redis, {} records of {} bytes, {} connections; {} rounds, all ways one after the other in \
         each, {} s for each load; medians over the rounds. A checkpoint or image every {} ms, or \
         when the one before is whole. Steady: {} requests a second, latency from when a request \
         was due. Saturated: each connection as fast as replies come. Kept: part of the replies of \
         the unprotected Redis of the same rounds. CPU: all programs of a host, in percent of one \
         processor; of the primary's, in brackets what the agent of Hotspare used. CPU a reply: of \
         both hosts. Lost with the host: which acknowledged writes, when host and disk are gone. \
         Every reply is checked.",
        arguments.keys,
        arguments.value_bytes,
        arguments.connections,
        rounds,
        arguments.seconds,
        arguments.interval_ms,
        arguments.rate,
    )
}

/// CRIU, or why there is none. A short run fetches nothing.
fn criu(common: &Common) -> Result<PathBuf, String> {
    if !common.hosts.is_empty() {
        return Err("its images are read from this machine's disk, not over --hosts".to_owned());
    }
    let here = tree::target().join("peers/criu/criu");
    if common.quick && !here.is_file() {
        return Err("not fetched yet (scripts/peers/criu)".to_owned());
    }
    let script = tree::root().join("scripts/peers/criu");
    let done = Command::new(script).output().map_err(|error| error.to_string())?;
    let said = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim().to_owned();
    if done.status.success() { Ok(said(&done.stdout).into()) } else { Err(said(&done.stderr)) }
}

fn skipped(tools: &Tools) -> String {
    let skipped = tools.criu.as_ref().err().map(|why| format!("\nCRIU was skipped: {why}\n"));
    skipped.unwrap_or_default()
}

/// Each way in each round; one row for each way and share of writes.
fn side_by_side(
    arguments: &OverheadArguments,
    tools: &Tools,
    ways: &[Way],
    interval_ms: u64,
    (what, part): (&'static str, f64),
    report: &mut Report,
) -> Result<Vec<Row>> {
    let ways = ways.iter().copied().filter(|way| *way != Way::Criu || tools.criu.is_ok());
    let shares = arguments.writes.len();
    let make =
        |way| (0..shares).map(move |_| Row { way, interval_ms, rounds: vec![], alone: vec![] });
    let mut rows: Vec<Row> = ways.flat_map(make).collect();
    for round in arguments.common.rounds(what, arguments.rounds, part) {
        let mut alone = vec![0.0; shares];
        for one in rows.chunks_mut(shares) {
            let way = one[0].way;
            let mut bench = arguments.bench(way, tools);
            bench.interval = Duration::from_millis(interval_ms);
            let results = overhead(&bench).with_context(|| format!("measure {}", way.name()))?;
            for ((row, result), alone) in one.iter_mut().zip(results).zip(&mut alone) {
                if way == Way::Unprotected {
                    *alone = result.replies_per_s;
                }
                println!(
                    "round {round}, {interval_ms} ms, {}: {:.0} replies/s",
                    way.name(),
                    result.replies_per_s
                );
                let of = json!({ "way": way.name(), "interval_ms": interval_ms, "alone": *alone });
                report.note(of, &result)?;
                row.alone.push(*alone);
                row.rounds.push(result);
            }
        }
    }
    Ok(rows)
}

const COLUMNS: [&str; 9] = [
    "kept by",
    "lost with the host",
    "steady: ms p50 / p99",
    "saturated: replies/s",
    "kept",
    "saturated: ms p50 / p99",
    "CPU % primary (agent) / spare",
    "CPU µs a reply",
    "images/s, pause ms p50",
];

fn cells(row: &Row) -> [String; 9] {
    let both = |of: fn(&OverheadResult) -> Spread| {
        let p99s = row.rounds.iter().map(|round| of(round).p99).collect();
        let p50s = row.rounds.iter().map(|round| of(round).p50).collect();
        format!("{:.2} / {:.2}", median(p50s), median(p99s))
    };
    let percent = |of: fn(&OverheadResult) -> f64| format!("{:.0}", row.median(of) * 100.0);
    let agent = match row.median(|round| round.agent) {
        0.0 => String::new(),
        agent => format!(" ({:.0})", agent * 100.0),
    };
    let images = match row.median(|round| round.images_per_s) {
        0.0 => String::new(),
        images => format!("{images:.1}, {:.1}", row.median(|round| round.pause_ms.p50)),
    };
    [
        row.way.name().to_owned(),
        row.way.loses().to_owned(),
        both(|round| round.steady_ms),
        format!("{:.0}", row.median(|round| round.replies_per_s)),
        format!("{:.0} %", row.kept() * 100.0),
        both(|round| round.saturated_ms),
        format!("{}{agent} / {}", percent(|round| round.primary), percent(|round| round.spare)),
        format!(
            "{:.0}",
            row.median(|round| (round.primary + round.spare) / round.replies_per_s * 1e6)
        ),
        images,
    ]
}

/// The ways that have an interval, and the unprotected Redis in each round.
const WITH_INTERVAL: [Way; 6] =
    [Way::Unprotected, Way::Timeline, Way::StopAndCopy, Way::BgSave, Way::Save, Way::Criu];

/// Half of the requests are writes; nothing steady is measured.
fn over_intervals(
    arguments: &OverheadArguments,
    tools: &Tools,
    report: &mut Report,
) -> Result<Vec<Row>> {
    let mut rows = Vec::new();
    let mut bench = OverheadArguments::with(arguments.common.clone());
    (bench.keys, bench.value_bytes) = (arguments.keys, arguments.value_bytes);
    (bench.connections, bench.rounds) = (arguments.connections, arguments.rounds);
    (bench.writes, bench.rate, bench.seconds) = (vec![0.5], 0.0, arguments.seconds);
    // At least two images of each.
    let seconds = |interval_ms: u64| arguments.seconds.max(interval_ms as f64 * 2.0 / 1e3);
    let all_s: f64 = arguments.intervals_ms.iter().map(|ms| seconds(*ms)).sum();
    for &interval_ms in &arguments.intervals_ms {
        bench.seconds = seconds(interval_ms);
        let part = 0.5 * bench.seconds / all_s;
        let what = ("overhead over intervals", part);
        rows.extend(side_by_side(&bench, tools, &WITH_INTERVAL, interval_ms, what, report)?);
    }
    Ok(rows)
}

fn interval_text(arguments: &OverheadArguments, rows: &[Row]) -> String {
    let heads: Vec<String> = arguments.intervals_ms.iter().map(|ms| format!("{ms} ms")).collect();
    let heads: Vec<&str> = ["kept by"].into_iter().chain(heads.iter().map(|h| &**h)).collect();
    println!();
    let mut table = Table::new(&heads);
    for way in WITH_INTERVAL {
        let of_way = rows.iter().filter(|row| row.way == way);
        let cell = |row: &Row| {
            let replies = row.median(|round| round.replies_per_s);
            if way == Way::Unprotected {
                return format!("{replies:.0}");
            }
            let images = row.median(|round| round.images_per_s);
            format!("{replies:.0} ({:.0} %) {images:.1}", row.kept() * 100.0)
        };
        let cells: Vec<String> = of_way.map(cell).collect();
        if !cells.is_empty() {
            table.row([way.name().to_owned()].into_iter().chain(cells));
        }
    }
    let counts = rows.iter().map(|row| row.rounds.len());
    let (fewest, most) = (counts.clone().min().unwrap_or(0), counts.max().unwrap_or(0));
    let rounds = if fewest == most { most.to_string() } else { format!("{fewest} to {most}") };
    let about = format!(
        "Over the interval between checkpoints or images (CheckSync, table 5.4), half of the \
         requests writes, {rounds} rounds: replies a second of the saturated Redis, part kept of \
         the unprotected one of the same rounds, images a second that were made in fact."
    );
    format!("\n{}\n{}", wrapped(&about), table.text)
}

fn plot(rows: &[Row]) -> Plot {
    let panel = |y: Axis, ways: &[Way], of: &dyn Fn(&Row) -> f64| {
        let curve = |way: &Way| Curve {
            name: way.name().to_owned(),
            points: rows
                .iter()
                .filter(|row| row.way == *way)
                .map(|row| (row.interval_ms as f64, of(row)))
                .collect(),
        };
        let curves = ways.iter().map(curve).filter(|curve| !curve.points.is_empty());
        Panel { x: Axis::log("ms between two checkpoints or images"), y, curves: curves.collect() }
    };
    Plot {
        name: "intervals".to_owned(),
        title: "A saturated Redis over the interval between checkpoints or images".to_owned(),
        about: "half of the requests writes; medians of rounds".to_owned(),
        panels: vec![
            panel(
                Axis::linear("replies kept of an unprotected Redis, %"),
                &WITH_INTERVAL[1..],
                &|row| row.kept() * 100.0,
            ),
            panel(Axis::log("pause of Redis, ms, p50"), &WITH_INTERVAL[1..], &|row| {
                row.median(|round| round.pause_ms.p50)
            }),
        ],
    }
}

/// What papers say of theirs. Only what their abstracts say.
const PUBLISHED: &str = "
Published, on other hardware and with other programs; to be read beside the tables, not as a part of
them:

| system | what its authors tell in their abstract | source |
| --- | --- | --- |
| CheckSync | go-cache loses 12 % of its throughput; 78 % with its own snapshots, 45 % with CRIU, \
68 % under live migration of a virtual machine | Kaashoek, Morris 2022, \
[arXiv:2208.02884](https://arxiv.org/abs/2208.02884) |
| NiLiCon | overhead 19 to 67 % over seven programs; all failures survived | Zhou, Tamir, \
IPDPS 2020, [10.1109/IPDPS47924.2020.00114](https://doi.org/10.1109/IPDPS47924.2020.00114) |
| HyCoR | overhead below 59 % over eight programs without data races; replies less than 1 ms \
later; recovery in less than 1 s | Zhou, Tamir 2021, \
[arXiv:2101.09584](https://arxiv.org/abs/2101.09584v1) |
";
