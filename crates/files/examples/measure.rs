//! What the FUSE costs: the same work on a plain directory, on a served one, and on one that is cut
//! every 100 ms with a spare applying the changes. `cargo run --release -p hotspare-files --example
//! measure`; needs root, `dd`, `sqlite3` and `xz`.

use std::error::Error;
use std::fs;
use std::path::Path;
use std::process::Command;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use hotspare_files::{ReplicatedDir, Role};

type Outcome<T> = Result<T, Box<dyn Error>>;

/// Runs a shell command in `directory` and tells how long it took.
fn time(directory: &Path, command: &str) -> Outcome<Duration> {
    let start = Instant::now();
    let output = Command::new("sh").args(["-ec", command]).current_dir(directory).output()?;
    if !output.status.success() {
        return Err(format!("{command}: {}", String::from_utf8_lossy(&output.stderr)).into());
    }
    Ok(start.elapsed())
}

/// Name, command, how much it does, of what.
const WORK: &[(&str, &str, f64, &str)] = &[
    ("write 4 KiB blocks", "dd if=/dev/zero of=f bs=4k count=40000 2>&1", 156.25, "MiB/s"),
    ("write 128 KiB blocks", "dd if=/dev/zero of=f bs=128k count=4000 2>&1", 500.0, "MiB/s"),
    ("read, cached", "cat f f f f > /dev/null", 2000.0, "MiB/s"),
    ("sqlite, journal", "sqlite3 db < ../inserts.sql >/dev/null", 3000.0, "inserts/s"),
    ("sqlite, WAL", "sqlite3 db-wal-mode < ../inserts-wal.sql >/dev/null", 20000.0, "inserts/s"),
    (
        "create and remove",
        "for n in 1 2 3 4 5; do touch $(seq 400); rm $(seq 400); done",
        2000.0,
        "files/s",
    ),
];

fn inserts(pragmas: &str, rows: u32) -> String {
    let mut script = format!("{pragmas} CREATE TABLE t(n INTEGER PRIMARY KEY, x TEXT);\n");
    for row in 0..rows {
        script.push_str(&format!("INSERT INTO t VALUES({row}, hex(randomblob(100)));\n"));
    }
    script
}

fn run_all(directory: &Path) -> Outcome<Vec<f64>> {
    let run = |(_, command, amount, _): &(&str, &str, f64, &str)| {
        Ok(amount / time(directory, command)?.as_secs_f64())
    };
    WORK.iter().map(run).collect()
}

/// Cuts every 100 ms and applies to a spare until told to stop; returns the times of the cuts.
fn replicate(
    primary: &ReplicatedDir,
    spare: &ReplicatedDir,
    stop: &AtomicBool,
) -> Outcome<Vec<Duration>> {
    let mut cuts = Vec::new();
    while !stop.load(Ordering::Acquire) {
        std::thread::sleep(Duration::from_millis(100));
        primary.flush()?;
        let start = Instant::now();
        primary.flush()?;
        let set = primary.cut()?;
        cuts.push(start.elapsed());
        let mut staged = spare.staging();
        for chunk in set.chunks(1 << 20) {
            staged.push_chunk(&chunk?)?;
        }
        spare.apply(&staged)?;
    }
    Ok(cuts)
}

fn main() -> Outcome<()> {
    let base = tempfile::tempdir_in(std::env::args().nth(1).unwrap_or("/var/tmp".into()))?;
    for name in ["plain", "backing", "mount", "spare-backing", "spare-mount"] {
        fs::create_dir(base.path().join(name))?;
    }
    fs::write(base.path().join("inserts.sql"), inserts("PRAGMA synchronous=OFF;", 3000))?;
    let pragmas = "PRAGMA journal_mode=WAL; PRAGMA synchronous=OFF;";
    fs::write(base.path().join("inserts-wal.sql"), inserts(pragmas, 20000))?;
    let path = |name: &str| base.path().join(name);
    let plain = run_all(&path("plain"))?;
    let primary = ReplicatedDir::serve(&path("backing"), &path("mount"), Role::Primary)?;
    let served = run_all(&path("mount"))?;
    time(&path("mount"), "rm -rf ./*")?;
    let spare = ReplicatedDir::serve(&path("spare-backing"), &path("spare-mount"), Role::Spare)?;
    for chunk in primary.initial_copy().chunks(1 << 20) {
        spare.copy_chunk(&chunk?)?;
    }
    let stop = AtomicBool::new(false);
    let (replicated, cuts) = std::thread::scope(|scope| {
        let cutting =
            scope.spawn(|| replicate(&primary, &spare, &stop).map_err(|error| error.to_string()));
        let replicated = run_all(&path("mount"));
        stop.store(true, Ordering::Release);
        (replicated, cutting.join())
    });
    let replicated = replicated?;
    println!("{:24}{:>10}{:>10}{:>12}", "", "plain", "served", "replicated");
    for (index, (name, _, _, unit)) in WORK.iter().enumerate() {
        let (plain, served, replicated) = (plain[index], served[index], replicated[index]);
        println!("{name:24}{plain:10.0}{served:10.0}{replicated:12.0}  {unit}");
    }
    let mut cuts = cuts.map_err(|_| "the cutting thread panicked")??;
    cuts.sort();
    if let (Some(median), Some(max)) = (cuts.get(cuts.len() / 2), cuts.last()) {
        println!("flush and cut: {} times, median {median:?}, longest {max:?}", cuts.len());
    }
    Ok(())
}
