//! Real programs on a replicated directory, with checkpoints while they run.

mod common;

use std::fs;
use std::path::Path;
use std::process::{Child, Command, Stdio};

use common::Pair;

fn start(program: &str, arguments: &[&str], directory: &Path) -> Child {
    Command::new(program)
        .args(arguments)
        .current_dir(directory)
        .stdin(Stdio::null())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap()
}

/// Stops a child for as long as `work` takes, as a checkpoint does.
fn while_stopped(child: &Child, work: impl FnOnce()) {
    use nix::sys::signal::{Signal, kill};
    use nix::sys::wait::{WaitPidFlag, waitpid};
    let pid = nix::unistd::Pid::from_raw(child.id() as i32);
    kill(pid, Signal::SIGSTOP).unwrap();
    waitpid(pid, Some(WaitPidFlag::WUNTRACED | WaitPidFlag::__WNOTHREAD)).unwrap();
    work();
    kill(pid, Signal::SIGCONT).unwrap();
}

/// A database in a loop of transactions: each checkpoint is a database that recovers by itself,
/// with a prefix of the rows.
fn sqlite_checkpoints_are_databases(journal: &str) {
    let pair = Pair::new();
    let create =
        format!("PRAGMA journal_mode={journal}; CREATE TABLE t(n INTEGER PRIMARY KEY, text TEXT);");
    let made = Command::new("sqlite3").arg(pair.path("db")).arg(create).output().unwrap();
    assert!(made.status.success(), "{made:?}");
    let script = pair.primary.backing.parent().unwrap().join("inserts.sql");
    let inserts: String = (1..=100_000)
        .map(|n| format!("INSERT INTO t VALUES({n}, hex(randomblob({})));\n", n % 300))
        .collect();
    fs::write(&script, inserts).unwrap();
    let read = format!(".read {}", script.display());
    let mut sqlite = start("sqlite3", &["db", &read], &pair.primary.mount);
    let mut last = 0;
    for _ in 0..15 {
        while_stopped(&sqlite, || pair.checkpoint());
        let copied = tempfile::tempdir().unwrap();
        for name in ["db", "db-wal", "db-journal", "db-shm"] {
            if pair.copy_of(name).exists() {
                fs::copy(pair.copy_of(name), copied.path().join(name)).unwrap();
            }
        }
        let question = "PRAGMA integrity_check; SELECT count(*), ifnull(max(n), 0) FROM t;";
        let answer =
            Command::new("sqlite3").arg(copied.path().join("db")).arg(question).output().unwrap();
        let answer = String::from_utf8(answer.stdout).unwrap();
        let (check, rows) = answer.trim().split_once('\n').unwrap();
        assert_eq!(check, "ok");
        let (count, max) = rows.split_once('|').unwrap();
        assert_eq!(count, max, "not a prefix");
        let count: u64 = count.parse().unwrap();
        assert!(count >= last);
        last = count;
    }
    sqlite.kill().unwrap();
    sqlite.wait().unwrap();
    assert!(last > 0);
}

#[test]
fn every_checkpoint_of_a_sqlite_database_with_a_journal_recovers() {
    sqlite_checkpoints_are_databases("DELETE");
}

#[test]
fn every_checkpoint_of_a_sqlite_database_with_a_write_ahead_log_recovers() {
    sqlite_checkpoints_are_databases("WAL");
}

#[test]
fn xz_writes_the_same_file_on_both_hosts() {
    let pair = Pair::new();
    let mut input = Vec::new();
    for n in 0..400_000u32 {
        input
            .extend_from_slice(format!("{n} {}\n", n.wrapping_mul(2_654_435_761) >> 20).as_bytes());
    }
    fs::write(pair.path("input"), &input).unwrap();
    let mut xz = start("xz", &["-T2", "-1", "--keep", "input"], &pair.primary.mount);
    while xz.try_wait().unwrap().is_none() {
        pair.checkpoint();
    }
    pair.checkpoint();
    pair.assert_equal();
    let unpacked = Command::new("xz").arg("-dc").arg(pair.copy_of("input.xz")).output().unwrap();
    assert!(unpacked.stdout == input);
}

#[test]
fn what_is_written_through_a_shared_mapping_replicates() {
    let pair = Pair::new();
    let script = r#"
import mmap, os, sys
fd = os.open("mapped", os.O_RDWR | os.O_CREAT)
os.ftruncate(fd, 1 << 20)
m = mmap.mmap(fd, 1 << 20)
os.close(fd)
for n in range(1 << 20):
    m[n] = n % 251
    if n % 65536 == 0:
        print(n, flush=True)
        sys.stdin.readline()
"#;
    let mut python = Command::new("python3")
        .args(["-c", script])
        .current_dir(&pair.primary.mount)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut go_on = python.stdin.take().unwrap();
    let said = std::io::BufReader::new(python.stdout.take().unwrap());
    for line in std::io::BufRead::lines(said) {
        let written: usize = line.unwrap().parse().unwrap();
        // It waits for us now: as good as stopped.
        pair.checkpoint();
        let copy = fs::read(pair.copy_of("mapped")).unwrap();
        let right = (0..=written).all(|n| copy[n] == (n % 251) as u8);
        assert!(right && copy[written + 1..].iter().all(|byte| *byte == 0), "at {written}");
        std::io::Write::write_all(&mut go_on, b"\n").unwrap();
    }
    assert!(python.wait().unwrap().success());
    pair.checkpoint();
    pair.assert_equal();
}

#[test]
fn a_mapping_on_the_spare_shows_each_checkpoint_and_its_new_end() {
    let pair = Pair::new();
    fs::write(pair.path("f"), vec![1; 4096]).unwrap();
    pair.checkpoint();
    let script = r#"
import mmap, os, sys
fd = os.open("f", os.O_RDONLY)
m = mmap.mmap(fd, 4096, prot=mmap.PROT_READ)
print(m[0], flush=True)
sys.stdin.readline()
m2 = mmap.mmap(fd, 8192, prot=mmap.PROT_READ)
print(m[0], m2[8191], flush=True)
"#;
    let mut python = Command::new("python3")
        .args(["-c", script])
        .current_dir(&pair.spare.mount)
        .stdin(Stdio::piped())
        .stdout(Stdio::piped())
        .spawn()
        .unwrap();
    let mut lines = std::io::BufRead::lines(std::io::BufReader::new(python.stdout.take().unwrap()));
    assert_eq!(lines.next().unwrap().unwrap(), "1");
    fs::write(pair.path("f"), vec![2; 8192]).unwrap();
    pair.checkpoint();
    std::io::Write::write_all(&mut python.stdin.take().unwrap(), b"\n").unwrap();
    assert_eq!(lines.next().unwrap().unwrap(), "2 2");
    assert!(python.wait().unwrap().success());
}
