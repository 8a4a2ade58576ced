//! Measurements, as tables. Nothing is asserted about them.

mod failover;
mod latency;

use std::path::PathBuf;
use std::process::Command;
use std::time::Duration;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};
use hotspare_torture::bench::{Measured, PauseBench, PauseResult, Spread, pause};

use crate::tree;

/// The parts of a pause, in the order of their happening.
const PARTS: [&str; 7] =
    ["stop_us", "registers_us", "scan_us", "objects_us", "copy_us", "files_us", "resume_us"];

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// How long checkpoints stop a Redis, over its size and load
    Pause(PauseArguments),
    /// How long clients wait when something dies, part by part, over the size of a Redis
    Failover(failover::FailoverArguments),
    /// What `--guarantee output-commit` and `timeline` add to each reply of five servers, and take
    /// from their throughput
    Latency(latency::LatencyArguments),
}

#[derive(Debug, Args)]
pub struct PauseArguments {
    /// Numbers of keys
    #[arg(long, value_delimiter = ',', default_value = "1000,10000,100000,1000000,10000000")]
    keys: Vec<u64>,
    /// Shares of writes
    #[arg(long, value_delimiter = ',', default_value = "0.1,0.5")]
    writes: Vec<f64>,
    /// Milliseconds between two checkpoints
    #[arg(long, default_value_t = 100)]
    epoch_ms: u64,
    /// Seconds measured for each load
    #[arg(long, default_value_t = 10)]
    seconds: u64,
    /// Requests a second of the steady load
    #[arg(long, default_value_t = 5000.0)]
    rate: f64,
    /// Leaves out the mode that stops and copies everything
    #[arg(long)]
    no_stop_and_copy: bool,
    /// Puts the tables into docs/benchmarks.md
    #[arg(long)]
    write: bool,
}

/// Runs a measurement and prints its tables.
pub fn bench(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Pause(arguments) => pauses(arguments),
        Bench::Failover(arguments) => failover::failovers(arguments),
        Bench::Latency(arguments) => latency::latencies(arguments),
    }
}

fn pauses(arguments: &PauseArguments) -> Result<()> {
    let hotspare = tree::build_hotspare()?;
    let mut overview = Table::new(&[
        "mode",
        "keys",
        "writes",
        "Redis MB",
        "pause µs p50 / p99 / max",
        "bytes/epoch",
        "saturated: pause µs",
        "plain/s",
        "no spare/s",
        "protected/s",
        "loss",
        "CPU % run / spare",
        "RSS MB run / spare",
    ]);
    let mut parts = Table::new(&[
        "mode",
        "keys",
        "writes",
        "stop",
        "registers",
        "scan",
        "objects",
        "copy",
        "files",
        "resume",
    ]);
    for &keys in &arguments.keys {
        for &writes in &arguments.writes {
            for (name, result, without) in rows(&hotspare, keys, writes, arguments)? {
                let head = [name.to_owned(), keys.to_string(), format!("{:.0} %", writes * 100.0)];
                overview.row(head.iter().cloned().chain(overview_of(&result, without)));
                let each = PARTS.iter().map(|part| three(&result.steady, part));
                parts.row(head.iter().cloned().chain(each));
            }
        }
    }
    let about = format!(
        "Redis, values of 72 bytes, a checkpoint every {} ms, {} s each. Steady load: {} requests \
         a second on 8 connections; pauses, parts and bytes are of it. Saturated: 8 connections, \
         each as fast as replies come; \"plain\" is Redis alone, \"no spare\" Redis under \
         `hotspare run` without a spare: no checkpoints, but namespaces of its own and one bridge \
         more. Plain is measured before and after the others; loss is against the mean. CPU: of \
         the agents under the saturated load, guest and ghost apart. RSS: most of the run so far, \
         filling and the first copy included.",
        arguments.epoch_ms, arguments.seconds, arguments.rate
    );
    let text = format!(
        "{}\n{}\n{}\nParts of the pause under the steady load, µs, p50 / p99 / max:\n\n{}",
        provenance()?,
        wrapped(&about),
        overview.text,
        parts.text
    );
    finish("pause", &text, arguments.write)
}

/// Each mode with the replies a second of an unprotected Redis, and of one without a spare. What
/// the machine does for others changes by the minute: plain is measured on both sides.
fn rows(
    hotspare: &PathBuf,
    keys: u64,
    writes: f64,
    arguments: &PauseArguments,
) -> Result<Vec<(&'static str, PauseResult, [f64; 2])>> {
    let replies = |mode| -> Result<f64> {
        Ok(run(mode, &[], keys, writes, arguments)?.saturated.replies_per_s)
    };
    let plain = replies((None, false))?;
    let bare = replies((Some(hotspare), false))?;
    let modes: &[(&str, &[&str])] = &[("pre-copy", &[]), ("stop-and-copy", &["--stop-and-copy"])];
    let modes = &modes[..if arguments.no_stop_and_copy { 1 } else { 2 }];
    let measure = |(name, more): &(&'static str, &[&str])| {
        let more: Vec<String> = more.iter().map(ToString::to_string).collect();
        Ok((*name, run((Some(hotspare), true), &more, keys, writes, arguments)?))
    };
    let results = modes.iter().map(measure).collect::<Result<Vec<_>>>()?;
    let plain = (plain + replies((None, false))?) / 2.0;
    Ok(results.into_iter().map(|(name, result)| (name, result, [plain, bare])).collect())
}

fn run(
    (hotspare, spare): (Option<&PathBuf>, bool),
    more: &[String],
    keys: u64,
    writes: f64,
    arguments: &PauseArguments,
) -> Result<PauseResult> {
    Ok(pause(&PauseBench {
        hotspare: hotspare.cloned(),
        spare,
        more: more.to_vec(),
        keys,
        writes,
        rate_per_s: arguments.rate,
        epoch: Duration::from_millis(arguments.epoch_ms),
        length: Duration::from_secs(arguments.seconds),
    })?)
}

fn overview_of(result: &PauseResult, [plain, bare]: [f64; 2]) -> [String; 10] {
    let protected = result.saturated.replies_per_s;
    let used = result.saturated.used.map(|used| format!("{:.0}", used * 100.0)).join(" / ");
    let bytes = result.steady.epochs.get("bytes").copied().unwrap_or_default();
    [
        format!("{:.0}", result.guest_mb),
        three(&result.steady, "pause_us"),
        if bytes.count == 0 { "none".to_owned() } else { format!("{:.0}", bytes.p50) },
        three(&result.saturated, "pause_us"),
        format!("{plain:.0}"),
        format!("{bare:.0}"),
        format!("{protected:.0}"),
        format!("{:.1} %", (1.0 - protected / plain) * 100.0),
        used,
        format!("{:.0} / {:.0}", result.primary_rss_mb, result.spare_rss_mb),
    ]
}

/// Of the checkpoints there were in the time.
fn three(measured: &Measured, name: &str) -> String {
    match measured.epochs.get(name) {
        Some(Spread { p50, p99, max, count: 1.., .. }) => format!("{p50:.0} / {p99:.0} / {max:.0}"),
        _ => "none".to_owned(),
    }
}

/// A table in Markdown that is also shown row by row while it grows.
struct Table {
    text: String,
    is_quiet: bool,
}

impl Table {
    fn new(names: &[&str]) -> Self {
        Self::with(names, false)
    }

    /// One that is shown when it is whole.
    fn quiet(names: &[&str]) -> Self {
        Self::with(names, true)
    }

    fn with(names: &[&str], is_quiet: bool) -> Self {
        let mut table = Self { text: String::new(), is_quiet };
        table.row(names.iter().map(ToString::to_string));
        table.row(names.iter().map(|_| "---".to_owned()));
        table
    }

    fn row(&mut self, cells: impl IntoIterator<Item = String>) {
        let cells: Vec<String> = cells.into_iter().collect();
        let row = format!("| {} |", cells.join(" | "));
        if !self.is_quiet {
            println!("{row}");
        }
        self.text.push_str(&row);
        self.text.push('\n');
    }
}

/// When, where and of what.
fn provenance() -> Result<String> {
    let said = |program: &str, arguments: &[&str]| -> Result<String> {
        let output = Command::new(program).args(arguments).output();
        let output = output.with_context(|| format!("run {program}"))?;
        Ok(String::from_utf8_lossy(&output.stdout).trim().to_owned())
    };
    let root = tree::root().to_string_lossy();
    let processors = std::fs::read_to_string("/proc/cpuinfo").context("read processors")?;
    let models = processors.lines().filter(|line| line.starts_with("model name"));
    let model = models.clone().next().and_then(|line| line.split_once(": "));
    let memory = std::fs::read_to_string("/proc/meminfo").context("read memory")?;
    let kib = memory.split_ascii_whitespace().nth(1).and_then(|kib| kib.parse::<u64>().ok());
    let made = format!(
        "{}, commit {}, {} × {}, {} GiB, Linux {}, all hosts on one machine.",
        said("date", &["-u", "+%F %H:%M UTC"])?,
        said("git", &["-C", &root, "describe", "--always", "--dirty"])?,
        models.count(),
        model.map_or("unknown processor", |(_, name)| name),
        kib.unwrap_or_default().div_ceil(1 << 20),
        said("uname", &["-r"])?,
    );
    let arguments: Vec<String> = std::env::args().skip(1).collect();
    Ok(format!("{}`cargo xtask {}`\n", wrapped(&made), arguments.join(" ")))
}

/// Text in lines of at most 100 columns.
fn wrapped(text: &str) -> String {
    let mut lines = vec![String::new()];
    for word in text.split_whitespace() {
        let last =
            lines.last_mut().filter(|line| line.chars().count() + word.chars().count() < 100);
        match last {
            Some(line) if line.is_empty() => line.push_str(word),
            Some(line) => line.extend([" ", word]),
            None => lines.push(word.to_owned()),
        }
    }
    lines.join("\n") + "\n"
}

/// Puts `text` between the marks of `name` in docs/benchmarks.md, if wanted.
fn finish(name: &str, text: &str, write: bool) -> Result<()> {
    if !write {
        return Ok(());
    }
    let path = tree::root().join("docs/benchmarks.md");
    let page = std::fs::read_to_string(&path).context("read docs/benchmarks.md")?;
    let page = between(&page, name, text).with_context(|| format!("no marks of {name}"))?;
    std::fs::write(path, page).context("write docs/benchmarks.md")
}

fn between(page: &str, name: &str, text: &str) -> Option<String> {
    let (first, last) = (format!("<!-- bench {name} -->"), format!("<!-- end {name} -->"));
    let (before, rest) = page.split_once(&first)?;
    let (_, after) = rest.split_once(&last)?;
    Some(format!("{before}{first}\n\n{text}\n{last}{after}"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn long_lines_are_broken_between_words() {
        let text = wrapped(&"a word ".repeat(40));
        assert!(text.lines().all(|line| line.len() <= 100) && text.lines().count() == 3);
        assert_eq!(text.split_whitespace().count(), 80);
        assert_eq!(wrapped("short"), "short\n");
    }

    #[test]
    fn a_table_takes_the_place_of_the_one_before() {
        let page = "a\n<!-- bench x -->\nold\n<!-- end x -->\nb";
        let new = between(page, "x", "new\n").unwrap();
        assert_eq!(new, "a\n<!-- bench x -->\n\nnew\n\n<!-- end x -->\nb");
        assert_eq!(between(&new, "x", "new\n").unwrap(), new);
        assert_eq!(between(page, "y", "new"), None);
    }
}
