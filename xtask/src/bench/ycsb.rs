//! `cargo xtask bench ycsb`.

use std::path::PathBuf;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::Args;
use hotspare_torture::bench::{
    Way, Weight, YcsbBench, YcsbCore, YcsbResult, build_ycsb, build_ycsb_java, median, weigh, ycsb,
};
use serde_json::{Value, json};

use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::tree;

#[derive(Debug, Args)]
pub struct YcsbArguments {
    #[command(flatten)]
    common: Common,
    /// Records of ten fields of 100 bytes
    #[arg(long, default_value_t = 20_000)]
    records: u64,
    /// Operations of each workload
    #[arg(long, default_value_t = 40_000)]
    operations: u64,
    /// Clients
    #[arg(long, default_value_t = 16)]
    threads: usize,
    /// Milliseconds between two checkpoints
    #[arg(long, value_delimiter = ',', default_value = "50,100,200,500,1000,2000")]
    intervals_ms: Vec<u64>,
    /// Numbers of records whose checkpoints are weighed
    #[arg(long, value_delimiter = ',', default_value = "1000,5000,20000,100000")]
    sizes: Vec<u64>,
    /// How often everything is measured, in turns
    #[arg(long, default_value_t = 20)]
    rounds: usize,
}

impl YcsbArguments {
    pub fn with(common: Common) -> YcsbArguments {
        YcsbArguments {
            common,
            records: 20_000,
            operations: 40_000,
            threads: 16,
            intervals_ms: vec![50, 100, 200, 500, 1000, 2000],
            sizes: vec![1000, 5000, 20_000, 100_000],
            rounds: 20,
        }
    }

    /// What a short run leaves out.
    fn shortened(&self) -> YcsbArguments {
        let mut short = YcsbArguments::with(self.common.clone());
        (short.records, short.operations, short.threads, short.rounds) = (500, 500, 4, 1);
        (short.intervals_ms, short.sizes) = (vec![100], vec![500]);
        short
    }

    fn bench(&self, tools: &Tools, core: &YcsbCore, way: Way, interval_ms: u64) -> YcsbBench {
        YcsbBench {
            way,
            hotspare: tools.hotspare.clone(),
            core: core.clone(),
            records: self.records,
            operations: self.operations,
            threads: self.threads,
            interval: Duration::from_millis(interval_ms),
        }
    }
}

struct Tools {
    hotspare: PathBuf,
    go: YcsbCore,
    /// Or why not.
    java: Result<YcsbCore, String>,
}

/// One way at one interval; those that have none are at 0.
struct Row {
    way: Way,
    interval_ms: u64,
    /// Workloads A and B of each round.
    rounds: Vec<Vec<YcsbResult>>,
}

impl Row {
    fn of(&self, core: &YcsbCore) -> Value {
        let mut of = json!({ "way": self.way.name(), "interval_ms": self.interval_ms });
        if matches!(core, YcsbCore::Java(_)) {
            of["core"] = "java".into();
        }
        of
    }

    fn median(&self, workload: usize, of: fn(&YcsbResult) -> f64) -> f64 {
        median(self.rounds.iter().map(|round| of(&round[workload])).collect())
    }
}

/// Measures in turns and shows.
pub fn ycsbs(arguments: &YcsbArguments) -> Result<()> {
    let shortened = arguments.common.quick.then(|| arguments.shortened());
    let arguments = shortened.as_ref().unwrap_or(arguments);
    ensure!(arguments.common.against.is_none(), "bench ycsb compares with peers, not commits");
    let dir = tree::target().join("peers");
    std::fs::create_dir_all(&dir).with_context(|| format!("make {}", dir.display()))?;
    let ycsb = match build_ycsb(&dir) {
        Ok(program) => program,
        Err(error) => {
            println!("bench ycsb is left out: tools/ycsb does not build here: {error}");
            return Ok(());
        }
    };
    let java = build_ycsb_java(&dir).map(YcsbCore::Java).map_err(|error| error.to_string());
    let tools = Tools { hotspare: tree::build_hotspare()?, go: YcsbCore::Go(ycsb), java };
    let mut report = Report::new("ycsb", &arguments.common)?;
    let rows = measure(arguments, &tools, &mut report)?;
    let by_java = by_java(arguments, &tools, &mut report)?;
    let mut table = Table::new(&COLUMNS);
    for row in &rows {
        table.row(cells(row));
        report.add(row.of(&tools.go), &row.rounds)?;
    }
    let weights = arguments.sizes.iter().map(|&records| {
        let mut bench = arguments.bench(&tools, &tools.go, Way::Timeline, 100);
        bench.records = records;
        weigh(&bench).with_context(|| format!("weigh checkpoints of {records} records"))
    });
    let weights = weights.collect::<Result<Vec<Weight>>>()?;
    report.add(json!({ "weights": arguments.operations }), &weights)?;
    report.plot(plot(&rows, &weights));
    println!();
    let mut weighed = Table::new(&["records", "full, bytes", "increment, bytes p50", "part", "of"]);
    for one in &weights {
        weighed.row([
            one.records.to_string(),
            format!("{:.0}", one.full_bytes),
            format!("{:.0}", one.increment_bytes),
            format!("{:.2} %", one.increment_bytes / one.full_bytes * 100.0),
            one.increments.to_string(),
        ]);
    }
    let text = format!(
        "{}\n{}\n{by_java}\n{}\n{}",
        wrapped(&about(arguments, rows[0].rounds.len())),
        table.text,
        wrapped(
            "What was sent for the first checkpoint (everything) and for those after it under \
             workload A, every 100 ms, over the size of the data set; \"of\": how many. Lines that \
             the spare has already are not sent again, so both are less than the memory."
        ),
        weighed.text
    );
    report.finish("ycsb", &text)
}

fn about(arguments: &YcsbArguments, rounds: usize) -> String {
    format!(
        "Core workloads of YCSB, by go-ycsb 1.0.1 (generators, clients and measurements are its \
         own; `tools/ycsb` takes its Redis binding): {} records of ten fields of 100 bytes in \
         hashes, {} operations by {} clients, each as fast as replies come, keys zipfian. A: half \
         updates of a field; B: 5 %. Time until all operations are done; latency as go-ycsb tells \
         it. {} rounds in turns, medians.",
        arguments.records, arguments.operations, arguments.threads, rounds
    )
}

fn measure(arguments: &YcsbArguments, tools: &Tools, report: &mut Report) -> Result<Vec<Row>> {
    let row = |way, interval_ms| Row { way, interval_ms, rounds: vec![] };
    let mut rows =
        vec![row(Way::Unprotected, 0), row(Way::Replica, 0), row(Way::OutputCommit, 100)];
    if arguments.common.quick {
        rows.truncate(1);
    }
    rows.extend(arguments.intervals_ms.iter().map(|&ms| row(Way::Timeline, ms)));
    in_turns(arguments, tools, (&tools.go, 0.65), &mut rows, report)?;
    Ok(rows)
}

/// Fills the rows, in turns, by a core in about this share of the time that the bench has.
fn in_turns(
    arguments: &YcsbArguments,
    tools: &Tools,
    (core, share): (&YcsbCore, f64),
    rows: &mut [Row],
    report: &mut Report,
) -> Result<()> {
    for round in arguments.common.rounds("ycsb", arguments.rounds, share) {
        for row in rows.iter_mut() {
            let bench = arguments.bench(tools, core, row.way, row.interval_ms.max(1));
            let results = ycsb(&bench).with_context(|| row.way.name())?;
            let (way, seconds) = (row.way.name(), results[0].seconds);
            println!("round {round}, {way} {}: {seconds:.2} s", row.interval_ms);
            report.note(row.of(core), &results)?;
            row.rounds.push(results);
        }
    }
    Ok(())
}

/// The same workloads by the Java YCSB, at one interval.
fn by_java(arguments: &YcsbArguments, tools: &Tools, report: &mut Report) -> Result<String> {
    let core = match &tools.java {
        Ok(core) => core,
        Err(why) => {
            println!("the Java YCSB is left out: {why}");
            return Ok(wrapped("The Java YCSB is left out: it does not build here."));
        }
    };
    let row = |way, interval_ms| Row { way, interval_ms, rounds: vec![] };
    let mut rows = vec![
        row(Way::Unprotected, 0),
        row(Way::Replica, 0),
        row(Way::OutputCommit, 100),
        row(Way::Timeline, 100),
    ];
    if arguments.common.quick {
        rows.truncate(1);
    }
    in_turns(arguments, tools, (core, 0.25), &mut rows, report)?;
    let mut table = Table::new(&JAVA_COLUMNS);
    for row in &rows {
        table.row(java_cells(row));
        report.add(row.of(core), &row.rounds)?;
    }
    let about = "The same by the Java YCSB 0.17.0 (`tools/ycsb-java`: a binding of ours on Jedis), \
                 which tells latency by kind; it shares the processors with what is measured.";
    Ok(format!("{}\n{}", wrapped(about), table.text))
}

const JAVA_COLUMNS: [&str; 8] = [
    "kept by",
    "interval",
    "A: s",
    "A, reads: ms p50 / p99",
    "A, updates: ms p50 / p99",
    "B: s",
    "B, reads: ms p50 / p99",
    "B, updates: ms p50 / p99",
];

fn java_cells(row: &Row) -> [String; 8] {
    let [way, interval, a, a_reads, b, b_reads] = cells(row);
    let updates = |workload| {
        let p50 = row.median(workload, |one| one.update_p50_ms);
        format!("{p50:.2} / {:.2}", row.median(workload, |one| one.update_p99_ms))
    };
    [way, interval, a, a_reads, updates(0), b, b_reads, updates(1)]
}

const COLUMNS: [&str; 6] =
    ["kept by", "interval", "A: s", "A: ms p50 / p99", "B: s", "B: ms p50 / p99"];

fn cells(row: &Row) -> [String; 6] {
    let latency = |workload| {
        let (p50, p99) =
            (row.median(workload, |one| one.p50_ms), row.median(workload, |one| one.p99_ms));
        format!("{p50:.2} / {p99:.2}")
    };
    let seconds = |workload| format!("{:.2}", row.median(workload, |one| one.seconds));
    let interval = match row.interval_ms {
        0 => String::new(),
        ms => format!("{ms} ms"),
    };
    [row.way.name().to_owned(), interval, seconds(0), latency(0), seconds(1), latency(1)]
}

fn plot(rows: &[Row], weights: &[Weight]) -> Plot {
    let of_timeline = || rows.iter().filter(|row| row.way == Way::Timeline);
    let curve = |name: &str, workload: usize| Curve {
        name: format!("{name}, Hotspare timeline"),
        points: of_timeline()
            .map(|row| (row.interval_ms as f64, row.median(workload, |one| one.seconds)))
            .collect(),
    };
    // What has no interval is a level line.
    let level = |way: Way, name: &str, workload: usize| Curve {
        name: format!("{name}, {}", way.name()),
        points: of_timeline()
            .filter_map(|at| {
                let row = rows.iter().find(|row| row.way == way)?;
                Some((at.interval_ms as f64, row.median(workload, |one| one.seconds)))
            })
            .collect(),
    };
    let weight = |name: &str, of: fn(&Weight) -> f64| Curve {
        name: name.to_owned(),
        points: weights.iter().map(|one| (one.records as f64, of(one))).collect(),
    };
    Plot {
        name: "completion".to_owned(),
        title: "YCSB over the interval between checkpoints; checkpoints over the data set"
            .to_owned(),
        about: "medians of rounds; logarithmic but for the time".to_owned(),
        panels: vec![
            Panel {
                x: Axis::log("ms between two checkpoints"),
                y: Axis::linear("completion time, s"),
                curves: vec![
                    curve("A", 0),
                    curve("B", 1),
                    level(Way::Unprotected, "A", 0),
                    level(Way::Unprotected, "B", 1),
                    level(Way::Replica, "A", 0),
                ],
            },
            Panel {
                x: Axis::log("records of 1 kB"),
                y: Axis::log("bytes of a checkpoint"),
                curves: vec![
                    weight("full", |one| one.full_bytes),
                    weight("increment", |one| one.increment_bytes),
                ],
            },
        ],
    }
}
