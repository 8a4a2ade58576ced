//! `cargo xtask bench scale`: what a checkpoint costs over the size of a guest.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result, ensure};
use clap::{Args, ValueEnum};
use hotspare_torture::bench::{ScaleBench, ScaleResult, scale};
use serde_json::json;

use super::PARTS;
use super::against::{Case, Figures, compare};
use super::plot::{Axis, Curve, Panel, Plot};
use super::report::{Common, Report, Table, wrapped};
use crate::{call, tree};

/// Where the others stand while one thing grows.
const MEMORY_MB: u64 = 64;
const PAGES_PER_S: u64 = 1000;
const EPOCH_MS: u64 = 100;

/// What grows.
#[derive(Clone, Copy, Debug, PartialEq, Eq, ValueEnum)]
enum Direction {
    /// Megabytes of memory
    Memory,
    /// Pages written a second
    Writes,
    /// Threads that sleep
    Threads,
    /// Threads that wake up a hundred times a second
    Wakers,
    /// Processes that sleep
    Processes,
    /// Mappings of one page each
    Mappings,
    /// TCP connections that nobody uses
    Connections,
    /// Milliseconds between two checkpoints
    Epoch,
}

#[derive(Clone, Debug, Args)]
pub struct ScaleArguments {
    #[command(flatten)]
    common: Common,
    /// Only these
    #[arg(long = "over", value_enum, value_delimiter = ',')]
    over: Vec<Direction>,
    /// Instead of the values of each
    #[arg(long, value_delimiter = ',')]
    values: Vec<u64>,
    /// Seconds measured for each value; up to ten times as long until there are 20 checkpoints
    #[arg(long, default_value_t = 5.0)]
    seconds: f64,
}

impl ScaleArguments {
    pub fn with(common: Common) -> ScaleArguments {
        ScaleArguments { common, over: vec![], values: vec![], seconds: 5.0 }
    }

    /// With loads that fit into the minutes that there are. Some get more time, until they have
    /// their twenty checkpoints; the largest guests are filled and shipped first.
    fn fitting(&self) -> ScaleArguments {
        let values: Vec<_> = directions(self)
            .into_iter()
            .flat_map(|(direction, values)| values.into_iter().map(move |value| (direction, value)))
            .collect();
        let filling = |(direction, value): &(Direction, u64)| match direction {
            Direction::Memory => 3.0 + *value as f64 / 200.0,
            _ => 4.0,
        };
        let others_s = values.iter().map(filling).sum();
        let loads = values.len() as f64 * 1.3;
        let seconds = self.common.seconds("scale", self.seconds, loads, others_s);
        ScaleArguments { seconds, ..self.clone() }
    }
}

impl Direction {
    fn label(self) -> &'static str {
        match self {
            Direction::Memory => "memory of the guest, MB",
            Direction::Writes => "pages written a second",
            Direction::Threads => "threads, asleep",
            Direction::Wakers => "threads that wake up 100 times a second",
            Direction::Processes => "processes, asleep",
            Direction::Mappings => "mappings",
            Direction::Connections => "TCP connections, idle",
            Direction::Epoch => "the time between two checkpoints, ms",
        }
    }

    fn name(self) -> String {
        self.to_possible_value().map(|value| value.get_name().to_owned()).unwrap_or_default()
    }

    fn values(self) -> &'static [u64] {
        match self {
            Direction::Memory => &[16, 64, 256, 1024, 4096, 8192],
            Direction::Writes => &[10, 100, 1000, 10_000, 100_000, 300_000],
            Direction::Threads => &[1, 10, 100, 1000],
            Direction::Wakers => &[1, 10, 100],
            Direction::Processes => &[1, 10, 50, 200],
            Direction::Mappings => &[100, 1000, 10_000, 50_000],
            Direction::Connections => &[1, 10, 100, 1000, 10_000],
            Direction::Epoch => &[2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000],
        }
    }

    /// A guest of that size.
    fn bench(self, value: u64, hotspare: &Path, load: &Path, seconds: f64) -> ScaleBench {
        let mut memory = MEMORY_MB;
        let mut pages = PAGES_PER_S;
        let (mut connections, mut epoch) = (0, EPOCH_MS);
        let mut more: Vec<(&str, u64)> = Vec::new();
        match self {
            Direction::Memory => memory = value,
            // Enough pages that few are written to twice in an epoch.
            Direction::Writes => (memory, pages) = (512, value),
            Direction::Threads => more.push(("--threads", value)),
            Direction::Wakers => more.extend([("--threads", value), ("--wakes-per-s", 100)]),
            Direction::Processes => more.push(("--processes", value)),
            Direction::Mappings => more.push(("--mappings", value)),
            Direction::Connections => connections = value as usize,
            Direction::Epoch => (epoch, pages) = (value, 10_000),
        }
        more.extend([("--memory-mb", memory), ("--pages-per-s", pages)]);
        let words = more.iter().flat_map(|(name, value)| [(*name).to_owned(), value.to_string()]);
        ScaleBench {
            hotspare: hotspare.to_owned(),
            load: load.to_owned(),
            words: words.collect(),
            connections,
            epoch: Duration::from_millis(epoch),
            length: Duration::from_secs_f64(seconds),
        }
    }
}

/// Measures and shows.
pub fn scales(arguments: &ScaleArguments) -> Result<()> {
    let load = build_load()?;
    if let Some(rev) = &arguments.common.against {
        return compare("scale", &arguments.common, rev, &cases(arguments, &load));
    }
    let hotspare = tree::build_hotspare()?;
    let arguments = &arguments.fitting();
    let mut report = Report::new("scale", &arguments.common)?;
    let mut text = wrapped(&about(arguments));
    for (direction, values) in directions(arguments) {
        println!("\n{}", direction.label());
        let mut table = Table::new(&columns(direction));
        let mut measured = Vec::new();
        for value in values {
            let bench = direction.bench(value, &hotspare, &load, seconds(arguments));
            match scale(&bench).with_context(|| format!("{} {value}", direction.name())) {
                Ok(result) => {
                    report.add(json!({ "over": direction.name(), "value": value }), &result)?;
                    table.row(row(value, &result));
                    measured.push((value, result));
                }
                Err(error) if arguments.common.quick => return Err(error),
                // A size that cannot be protected is a result, too.
                Err(error) => {
                    eprintln!("{error:#}");
                    report.add(
                        json!({ "over": direction.name(), "value": value }),
                        &json!({ "failed": format!("{error:#}") }),
                    )?;
                    table.row([value.to_string(), "not measured".to_owned()]);
                }
            }
        }
        text.push_str(&format!("\nOver {}:\n\n{}", direction.label(), table.text));
        if !measured.is_empty() {
            report.plot(plot(direction, &measured));
        }
    }
    report.finish("scale", &text)
}

fn directions(arguments: &ScaleArguments) -> Vec<(Direction, Vec<u64>)> {
    let chosen = Direction::value_variants().iter().copied();
    let chosen = chosen.filter(|one| arguments.over.is_empty() || arguments.over.contains(one));
    let values = |direction: Direction| match (arguments.common.quick, &arguments.values[..]) {
        (true, []) => vec![direction.values()[1]],
        (false, []) => direction.values().to_vec(),
        (_, values) => values.to_vec(),
    };
    chosen.map(|direction| (direction, values(direction))).collect()
}

fn seconds(arguments: &ScaleArguments) -> f64 {
    if arguments.common.quick { 0.2 } else { arguments.seconds }
}

fn about(arguments: &ScaleArguments) -> String {
    format!(
        "A program of ours (`bench/load.c`) that grows in one direction at a time; otherwise it \
         has {MEMORY_MB} MB, writes to {PAGES_PER_S} random pages a second (8 bytes each; over the \
         length of an epoch 10,000), and there is a checkpoint every {EPOCH_MS} ms. {:.1} s for \
         each value, longer until there were 20 checkpoints. Pause p50 / p99 / max, its parts p50; \
         CPU as a part of one processor; resident memory at the end, in brackets the most that the \
         agent had before, the first copy included; kept: what the guest and its ghost have.",
        arguments.seconds
    )
}

fn columns(direction: Direction) -> Vec<&'static str> {
    let parts = PARTS.iter().filter(|part| **part != "files_us");
    let parts = parts.map(|part| part.trim_end_matches("_us"));
    let (first, last) = (
        [direction.label(), "checkpoints/s", "pause µs"],
        [
            "bytes/epoch",
            "commit ms",
            "CPU % run / spare",
            "RSS MB run (most) / spare (most)",
            "kept MB guest / ghost",
        ],
    );
    first.into_iter().chain(parts).chain(last).collect()
}

fn row(value: u64, result: &ScaleResult) -> Vec<String> {
    let spread = |name: &str| result.epochs.get(name).copied().unwrap_or_default();
    let pause = spread("pause_us");
    let mut cells = vec![value.to_string(), format!("{:.1}", result.epochs_per_s)];
    if pause.count == 0 {
        cells.push("no checkpoint in the time".to_owned());
        return cells;
    }
    cells.push(format!("{:.0} / {:.0} / {:.0}", pause.p50, pause.p99, pause.max));
    let parts = PARTS.iter().filter(|part| **part != "files_us");
    cells.extend(parts.map(|part| format!("{:.0}", spread(part).p50)));
    cells.push(format!("{:.0}", spread("bytes").p50));
    cells.push(format!("{:.1}", spread("commit_ms").p50));
    cells.push(result.used.map(|used| format!("{:.1}", used * 100.0)).join(" / "));
    let rss = result.rss_mb.iter().zip(&result.rss_most_mb);
    let rss: Vec<String> = rss.map(|(now, most)| format!("{now:.0} ({most:.0})")).collect();
    cells.push(rss.join(" / "));
    cells.push(result.kept_mb.map(|mb| format!("{mb:.0}")).join(" / "));
    cells
}

fn plot(direction: Direction, measured: &[(u64, ScaleResult)]) -> Plot {
    let curve = |name: &str, of: &dyn Fn(&ScaleResult) -> f64| Curve {
        name: name.to_owned(),
        points: measured.iter().map(|(value, result)| (*value as f64, of(result))).collect(),
    };
    let spread =
        |result: &ScaleResult, name: &str| result.epochs.get(name).copied().unwrap_or_default();
    let panel =
        |y: &str, curves| Panel { x: Axis::log(direction.label()), y: Axis::log(y), curves };
    let parts = PARTS.iter().filter(|part| **part != "files_us");
    let parts =
        parts.map(|part| curve(part.trim_end_matches("_us"), &|result| spread(result, part).p50));
    let pauses = vec![
        curve("p50", &|result| spread(result, "pause_us").p50),
        curve("p99", &|result| spread(result, "pause_us").p99),
        curve("max", &|result| spread(result, "pause_us").max),
    ];
    let bytes = vec![
        curve("bytes an epoch, p50", &|result| spread(result, "bytes").p50),
        curve("bytes a second", &|result| result.bytes_per_s),
    ];
    let used = vec![
        curve("hotspare run", &|result| result.used[0] * 100.0),
        curve("hotspare spare", &|result| result.used[1] * 100.0),
    ];
    let commits = vec![
        curve("p50", &|result| spread(result, "commit_ms").p50),
        curve("p99", &|result| spread(result, "commit_ms").p99),
    ];
    let memory = vec![
        curve("hotspare run", &|result| result.rss_mb[0]),
        curve("its most", &|result| result.rss_most_mb[0]),
        curve("hotspare spare", &|result| result.rss_mb[1]),
        curve("its most", &|result| result.rss_most_mb[1]),
        curve("guest", &|result| result.kept_mb[0]),
        curve("ghost", &|result| result.kept_mb[1]),
    ];
    Plot {
        name: direction.name(),
        title: format!("Checkpoints over {}", direction.label()),
        about: "bench/load.c; all scales logarithmic".to_owned(),
        panels: vec![
            panel("pause, µs", pauses),
            panel("parts of the pause, p50, µs", parts.collect()),
            panel("bytes on the wire", bytes),
            panel("processor time, % of one", used),
            panel("from the stop until it is acknowledged, ms", commits),
            panel("resident memory, MB", memory),
        ],
    }
}

fn cases<'a>(arguments: &'a ScaleArguments, load: &'a Path) -> Vec<Case<'a>> {
    let pairs = directions(arguments)
        .into_iter()
        .flat_map(|(direction, values)| values.into_iter().map(move |value| (direction, value)));
    let case = |(direction, value): (Direction, u64)| Case {
        name: format!("{} {value}", direction.name()),
        measure: Box::new(move |hotspare| {
            let bench = direction.bench(value, hotspare, load, seconds(arguments));
            Ok(figures(&scale(&bench)?))
        }),
    };
    pairs.map(case).collect()
}

fn figures(result: &ScaleResult) -> Figures {
    let spread = |name: &str| result.epochs.get(name).copied().unwrap_or_default();
    let per_checkpoint = |used: f64| used * 1000.0 / result.epochs_per_s;
    let mut figures = Figures::from([
        ("pause p50 µs".to_owned(), spread("pause_us").p50),
        ("pause p99 µs".to_owned(), spread("pause_us").p99),
        ("commit p50 ms".to_owned(), spread("commit_ms").p50),
        ("checkpoints/s".to_owned(), result.epochs_per_s),
        ("CPU of run, ms a checkpoint".to_owned(), per_checkpoint(result.used[0])),
        ("CPU of spare, ms a checkpoint".to_owned(), per_checkpoint(result.used[1])),
    ]);
    for part in ["stop_us", "registers_us", "scan_us", "objects_us"] {
        let name = part.trim_end_matches("_us");
        figures.insert(format!("{name} p50 µs"), spread(part).p50);
    }
    figures
}

/// Builds the program that grows.
fn build_load() -> Result<PathBuf> {
    let load = tree::target().join("bench/load");
    std::fs::create_dir_all(tree::target().join("bench")).context("make target/bench")?;
    let mut compile = Command::new("cc");
    compile.args(["-O2", "-std=gnu11", "-pthread", "-o"]).arg(&load);
    call({
        compile.arg(tree::root().join("bench/load.c"));
        compile
    })
    .context("build bench/load.c (see scripts/setup)")?;
    ensure!(load.is_file(), "{} was not built", load.display());
    Ok(load)
}
