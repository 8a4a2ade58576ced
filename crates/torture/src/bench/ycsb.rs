//! YCSB against a Redis that is kept in some way, and what checkpoints of it weigh.

use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Duration;

use serde::Serialize;

use super::overhead::{OverheadBench, Way, make_bed};
use super::{PORT, Spread, epochs, numbers};
use crate::Lab;
use crate::clock::Instant;
use crate::lab::{LabError, Process, SERVICE_CIDR, SERVICE_V4};
use crate::protected::{Engine, HANG, wait_for_service};

/// A workload that takes longer hangs.
const RUN_AT_MOST: Duration = Duration::from_secs(300);

/// Whose core workloads: generators, clients and measurements are its own.
#[derive(Clone, Debug)]
pub enum YcsbCore {
    /// go-ycsb: `tools/ycsb`, built.
    Go(PathBuf),
    /// The Java YCSB: the directory of its classes with our binding, `tools/ycsb-java`.
    Java(PathBuf),
}

/// A Redis and the workloads that come one after the other.
#[derive(Clone, Debug)]
pub struct YcsbBench {
    /// How Redis is kept.
    pub way: Way,
    /// The `hotspare` program.
    pub hotspare: PathBuf,
    /// Who asks.
    pub core: YcsbCore,
    /// Records of ten fields of 100 bytes.
    pub records: u64,
    /// Operations of each workload.
    pub operations: u64,
    /// Clients.
    pub threads: usize,
    /// Between two checkpoints.
    pub interval: Duration,
}

/// Seconds until all operations were done, and their latency.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct YcsbResult {
    /// Part of operations that update a field of a record; the others read a record.
    pub updates: f64,
    /// From the first operation to the last.
    pub seconds: f64,
    /// Of all operations, as go-ycsb tells it; of reads, as the Java YCSB does. Milliseconds.
    pub p50_ms: f64,
    /// As `p50_ms`.
    pub p99_ms: f64,
    /// Of updates, by the Java YCSB.
    pub update_p50_ms: f64,
    /// As `update_p50_ms`.
    pub update_p99_ms: f64,
    /// Bytes sent for a checkpoint, p50.
    pub checkpoint_bytes: f64,
    /// Checkpoints.
    pub checkpoints: usize,
}

/// Loads the records, then runs workload A (half updates) and B (5 % updates), in a lab of its own.
pub fn ycsb(bench: &YcsbBench) -> Result<Vec<YcsbResult>, LabError> {
    let bed = make_bed(&OverheadBench {
        way: bench.way,
        hotspare: bench.hotspare.clone(),
        criu: PathBuf::new(),
        keys: 1,
        value_bytes: 1,
        writes: vec![],
        connections: 0,
        rate_per_s: 0.0,
        interval: bench.interval,
        length: Duration::ZERO,
    })?;
    work(&bed.lab, bench, "load", 0.0)?;
    let run = |updates: f64| {
        let start = Instant::now();
        let mut result = work(&bed.lab, bench, "run", updates)?;
        let mut epochs = epochs(&bed.primary, (start, Instant::now()));
        let bytes = Spread::of(epochs.remove("bytes").unwrap_or_default());
        (result.checkpoint_bytes, result.checkpoints) = (bytes.p50, bytes.count);
        Ok(result)
    };
    [0.5, 0.05].into_iter().map(run).collect()
}

fn work(lab: &Lab, bench: &YcsbBench, command: &str, updates: f64) -> Result<YcsbResult, LabError> {
    let properties = [
        format!("recordcount={}", bench.records),
        format!("operationcount={}", bench.operations),
        format!("threadcount={}", bench.threads),
        format!("readproportion={}", 1.0 - updates),
        format!("updateproportion={updates}"),
        "requestdistribution=zipfian".to_owned(),
    ];
    let mut ycsb = match &bench.core {
        YcsbCore::Go(program) => go(program, command, &properties),
        YcsbCore::Java(classes) => java(classes, command, &properties),
    };
    let said = lab.client().run(&mut ycsb, RUN_AT_MOST)?;
    let told = match &bench.core {
        YcsbCore::Go(_) => go_told(&said),
        YcsbCore::Java(_) => java_told(&said, if command == "load" { "INSERT" } else { "READ" }),
    };
    let told = told.map(|result| YcsbResult { updates, ..result });
    told.ok_or_else(|| LabError::Io {
        doing: format!("run YCSB ({command})"),
        source: std::io::Error::other(said),
    })
}

fn go(program: &Path, command: &str, properties: &[String]) -> Command {
    let mut ycsb = Command::new(program);
    ycsb.arg(command).arg(format!("redis.addr={SERVICE_V4}:{PORT}")).args(properties);
    ycsb
}

fn java(classes: &Path, command: &str, properties: &[String]) -> Command {
    let mut ycsb = Command::new("java");
    let classes = classes.display();
    ycsb.args(["-Xmx512m", "-cp", &format!("{classes}:{classes}/*"), "site.ycsb.Client"]);
    ycsb.args([if command == "load" { "-load" } else { "-t" }, "-db", "RedisBinding"]);
    let own = [
        "workload=site.ycsb.workloads.CoreWorkload".to_owned(),
        "hdrhistogram.percentiles=50,99".to_owned(),
        format!("redis.host={SERVICE_V4}"),
        format!("redis.port={PORT}"),
    ];
    ycsb.args(own.iter().chain(properties).flat_map(|property| ["-p", property]));
    ycsb
}

/// What a summary of go-ycsb says; nothing if something failed.
fn go_told(said: &str) -> Option<YcsbResult> {
    if said.contains("_ERROR") {
        return None;
    }
    let seconds = said.lines().last().and_then(seconds_of)?;
    let total = said.lines().find(|line| line.starts_with("TOTAL"))?;
    let ms = |name: &str| micros_of(total, name).map(|us| us / 1e3);
    let (p50_ms, p99_ms) = (ms("50th(us): ")?, ms("99th(us): ")?);
    Some(YcsbResult { seconds, p50_ms, p99_ms, ..YcsbResult::default() })
}

/// What a summary of the Java YCSB says, with the latency of `kind`; nothing if something failed.
fn java_told(said: &str, kind: &str) -> Option<YcsbResult> {
    let is_wrong = |line: &str| line.contains("Return=") && !line.contains("Return=OK");
    if said.lines().any(is_wrong) {
        return None;
    }
    let figure = |kind: &str, name: &str| -> Option<f64> {
        let head = format!("[{kind}], {name}, ");
        said.lines().find_map(|line| line.strip_prefix(&head))?.trim().parse().ok()
    };
    let percentile = |kind: &str, percent: u32| {
        figure(kind, &format!("{percent}thPercentileLatency(us)")).map(|us| us / 1e3)
    };
    Some(YcsbResult {
        seconds: figure("OVERALL", "RunTime(ms)")? / 1e3,
        p50_ms: percentile(kind, 50)?,
        p99_ms: percentile(kind, 99)?,
        update_p50_ms: percentile("UPDATE", 50).unwrap_or_default(),
        update_p99_ms: percentile("UPDATE", 99).unwrap_or_default(),
        ..YcsbResult::default()
    })
}

fn seconds_of(line: &str) -> Option<f64> {
    let value: serde_json::Value = serde_json::from_str(line).ok()?;
    value.get("seconds")?.as_f64()
}

/// A figure of a line of go-ycsb's summary.
fn micros_of(line: &str, name: &str) -> Option<f64> {
    let (_, rest) = line.split_once(&format!(" {name}"))?;
    rest.split(',').next()?.trim().parse().ok()
}

/// What checkpoints of a Redis with records of YCSB weigh.
#[derive(Clone, Copy, Debug, Default, Serialize)]
pub struct Weight {
    /// Records of ten fields of 100 bytes.
    pub records: u64,
    /// Of the first checkpoint, which has everything, as it was sent.
    pub full_bytes: f64,
    /// Of those under workload A, p50.
    pub increment_bytes: f64,
    /// How many of these there were.
    pub increments: usize,
}

/// Fills a Redis before it gets its spare, then runs workload A.
pub fn weigh(bench: &YcsbBench) -> Result<Weight, LabError> {
    let lab = Lab::new(2)?;
    let engine = Engine {
        binary: bench.hotspare.clone(),
        epoch: bench.interval,
        service_cidr: Some(SERVICE_CIDR.to_owned()),
        replicated: vec![],
        more: vec![],
    }
    .patient();
    let primary = engine.run(lab.host(0), &[lab.host(1)], &super::redis())?;
    wait_for_service(lab.client(), (SERVICE_V4, PORT).into(), HANG)?;
    work(&lab, bench, "load", 0.0)?;
    let _spare = engine.patient_spare(lab.host(1))?;
    Engine::protected(&primary)?;
    let full_bytes = first_bytes(&primary)?;
    let start = Instant::now();
    work(&lab, bench, "run", 0.5)?;
    let mut epochs = epochs(&primary, (start, Instant::now()));
    let bytes = Spread::of(epochs.remove("bytes").unwrap_or_default());
    let (increment_bytes, increments) = (bytes.p50, bytes.count);
    Ok(Weight { records: bench.records, full_bytes, increment_bytes, increments })
}

fn first_bytes(primary: &Process) -> Result<f64, LabError> {
    let bytes = |line: &crate::lab::Line| {
        numbers(&line.text)?.into_iter().find(|(name, _)| name == "bytes").map(|(_, bytes)| bytes)
    };
    primary
        .stdout()
        .find(HANG, bytes)
        .ok_or_else(|| LabError::Deadline { what: "the first checkpoint".into(), waited: HANG })
}

/// Builds `tools/ycsb` into a directory; its modules come through the Go module proxy.
pub fn build_ycsb(to: &Path) -> std::io::Result<PathBuf> {
    let source = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/ycsb");
    let program = to.join("ycsb");
    let mut go = Command::new("go");
    let output = go.args(["build", "-o"]).arg(&program).arg(".").current_dir(source).output()?;
    if output.status.success() {
        return Ok(program);
    }
    Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()))
}

/// Fetches the Java YCSB from Maven Central into a directory and compiles our binding there.
pub fn build_ycsb_java(to: &Path) -> std::io::Result<PathBuf> {
    let build = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../tools/ycsb-java/build");
    let classes = to.join("ycsb-java");
    let output = Command::new(build).arg(&classes).output()?;
    if output.status.success() {
        return Ok(classes);
    }
    Err(std::io::Error::other(String::from_utf8_lossy(&output.stderr).into_owned()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_go_ycsb_says_is_read() {
        let line = "TOTAL  - Takes(s): 0.2, Count: 10000, OPS: 55511.7, Avg(us): 137, Min(us): 11, \
                    Max(us): 4875, 50th(us): 95, 90th(us): 234, 95th(us): 382, 99th(us): 1021";
        assert_eq!(micros_of(line, "50th(us): "), Some(95.0));
        assert_eq!(micros_of(line, "99th(us): "), Some(1021.0));
        assert_eq!(micros_of(line, "98th(us): "), None);
        assert_eq!(seconds_of(r#"{"seconds":0.5}"#), Some(0.5));
        let said = format!("{line}\n{{\"seconds\":0.5}}");
        assert_eq!(go_told(&said).map(|told| told.p99_ms), Some(1.021));
        assert!(go_told(&format!("READ_ERROR - Count: 1\n{said}")).is_none());
    }

    #[test]
    fn what_the_java_ycsb_says_is_read() {
        let said = "[OVERALL], RunTime(ms), 404\n[OVERALL], Throughput(ops/sec), 4950.5\n\
                    [READ], 50thPercentileLatency(us), 187\n[READ], Return=OK, 1025\n\
                    [READ], 99thPercentileLatency(us), 3159\n\
                    [UPDATE], 50thPercentileLatency(us), 234\n\
                    [UPDATE], 99thPercentileLatency(us), 4823\n";
        let told = java_told(said, "READ").unwrap();
        assert_eq!((told.seconds, told.p50_ms, told.update_p99_ms), (0.404, 0.187, 4.823));
        assert!(java_told(said, "INSERT").is_none());
        assert!(java_told(&format!("{said}[READ], Return=ERROR, 1\n"), "READ").is_none());
    }
}
