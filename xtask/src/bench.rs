//! Measurements, as tables. Nothing is asserted about them.

mod against;
mod batch;
mod day;
mod failover;
mod latency;
mod overhead;
mod pause;
mod plot;
mod report;
mod restart;
mod scale;
mod sentinel;
mod ycsb;

use anyhow::{Context, Result};
use clap::{Args, Subcommand};

use self::report::Common;

/// The parts of a pause, in the order of their happening.
const PARTS: [&str; 7] =
    ["stop_us", "registers_us", "scan_us", "objects_us", "copy_us", "files_us", "resume_us"];

#[derive(Debug, Subcommand)]
pub enum Bench {
    /// How long checkpoints stop a Redis, over its size and load
    Pause(pause::PauseArguments),
    /// How long clients wait when something dies, part by part, over the size of a Redis
    Failover(failover::FailoverArguments),
    /// What `--guarantee output-commit` and `timeline` add to each reply of servers, and take
    /// from their throughput
    Latency(latency::LatencyArguments),
    /// What it costs to keep a Redis from being lost: Hotspare beside replicas, logs, snapshots and
    /// CRIU
    Overhead(overhead::OverheadArguments),
    /// A host's death as clients of a Redis see it: Hotspare beside Redis Sentinel
    Sentinel(sentinel::SentinelArguments),
    /// How long workloads A and B of YCSB take, and what checkpoints weigh, over the interval and
    /// the data set
    Ycsb(ycsb::YcsbArguments),
    /// What protection takes from two multithreaded programs that only compute
    Batch(batch::BatchArguments),
    /// What checkpoints cost over memory, writes, threads, processes, mappings, connections and
    /// the length of an epoch
    Scale(scale::ScaleArguments),
    /// How long programs take to start again from a store behind a slow line, as FREM's tables
    Restart(restart::RestartArguments),
    /// A day of stored checkpoints in accelerated time: size, requests, cost
    Day(day::DayArguments),
    /// How long clients of a Redis with ten million keys wait when it comes back from a store
    FirstReply(restart::ReplyArguments),
    /// All of them, one after the other
    All(AllArguments),
}

#[derive(Debug, Args)]
pub struct AllArguments {
    #[command(flatten)]
    common: Common,
}

/// Runs a measurement, shows its tables and keeps its results.
pub fn bench(bench: &Bench) -> Result<()> {
    match bench {
        Bench::Pause(arguments) => pause::pauses(arguments),
        Bench::Failover(arguments) => failover::failovers(arguments),
        Bench::Latency(arguments) => latency::latencies(arguments),
        Bench::Overhead(arguments) => overhead::overheads(arguments),
        Bench::Sentinel(arguments) => sentinel::sentinels(arguments),
        Bench::Ycsb(arguments) => ycsb::ycsbs(arguments),
        Bench::Batch(arguments) => batch::batches(arguments),
        Bench::Scale(arguments) => scale::scales(arguments),
        Bench::Restart(arguments) => restart::restarts(arguments),
        Bench::Day(arguments) => day::day(arguments),
        Bench::FirstReply(arguments) => restart::replies(arguments),
        Bench::All(arguments) => all(&arguments.common),
    }
}

/// Each suite as it is without arguments of its own.
fn all(common: &Common) -> Result<()> {
    for (name, suite) in suites(common) {
        if !common.hosts.is_empty() && common.hosts.len() < hosts_wanted(name) {
            println!("\n== bench {name} is left out: it is not for these hosts");
            continue;
        }
        println!("\n== bench {name}");
        let begun = std::time::Instant::now();
        suite().with_context(|| format!("bench {name}"))?;
        println!("== bench {name} took {:.1} min", begun.elapsed().as_secs_f64() / 60.0);
    }
    Ok(())
}

/// How many real hosts a suite takes; more than anybody has, if it takes none.
fn hosts_wanted(suite: &str) -> usize {
    match suite {
        "restart" | "first-reply" => usize::MAX,
        "sentinel" => 3,
        _ => 2,
    }
}

type Suite = Box<dyn FnOnce() -> Result<()>>;

fn suites(common: &Common) -> Vec<(&'static str, Suite)> {
    let common = || common.clone();
    let (pause, failover) =
        (pause::PauseArguments::with(common()), failover::FailoverArguments::with(common()));
    let unnoticed = failover::FailoverArguments::unnoticed(common());
    let (latency, scale) =
        (latency::LatencyArguments::with(common()), scale::ScaleArguments::with(common()));
    let ycsb = ycsb::YcsbArguments::with(common());
    let overhead = overhead::OverheadArguments::with(common());
    let (sentinel, batch) =
        (sentinel::SentinelArguments::with(common()), batch::BatchArguments::with(common()));
    let day = day::DayArguments::with(common());
    let (restart, reply) =
        (restart::RestartArguments::with(common()), restart::ReplyArguments::with(common()));
    vec![
        ("pause", Box::new(move || pause::pauses(&pause))),
        ("failover", Box::new(move || failover::failovers(&failover))),
        ("unnoticed failover", Box::new(move || failover::failovers(&unnoticed))),
        ("latency", Box::new(move || latency::latencies(&latency))),
        ("overhead", Box::new(move || overhead::overheads(&overhead))),
        ("sentinel", Box::new(move || sentinel::sentinels(&sentinel))),
        ("ycsb", Box::new(move || ycsb::ycsbs(&ycsb))),
        ("batch", Box::new(move || batch::batches(&batch))),
        ("scale", Box::new(move || scale::scales(&scale))),
        ("restart", Box::new(move || restart::restarts(&restart))),
        ("day", Box::new(move || day::day(&day))),
        ("first-reply", Box::new(move || restart::replies(&reply))),
    ]
}

/// What CI does: shows that every suite runs. How many did, and why the others did not.
pub fn quick() -> (u64, Vec<String>) {
    let common = Common { quick: true, ..Common::default() };
    let (mut passed, mut failures) = (0, Vec::new());
    for (name, suite) in suites(&common) {
        match suite() {
            Ok(()) => passed += 1,
            Err(error) => {
                println!("bench {name}: {error:#}");
                // What the agents said is above; the end of the output is short.
                let why = format!("{error:#}");
                failures.push(format!("{name}: {}", why.lines().next().unwrap_or_default()));
            }
        }
    }
    (passed, failures)
}
