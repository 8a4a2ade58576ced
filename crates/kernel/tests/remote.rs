//! The stub and write tracking on a real child process.

use std::os::fd::AsFd;
use std::process::{Child, Command};
use std::time::Duration;

use hotspare_kernel::pagemap::{Pagemap, Query, Scanned, category};
use hotspare_kernel::ptrace::{self, HostPid, Stop, Waited, Whose};
use hotspare_kernel::remote::{Call, Stub, vdso_syscall};
use hotspare_kernel::userfaultfd::WriteTracker;
use hotspare_kernel::{memory, pidfd, proc_maps};

struct Sleeper(Child, HostPid);

impl Sleeper {
    fn stopped() -> Self {
        let child = Command::new("sleep").arg("1000").spawn().expect("spawns");
        let tid = HostPid(child.id() as i32);
        while !std::fs::read_link(format!("/proc/{tid}/exe")).expect("link").ends_with("sleep") {}
        ptrace::seize(tid).expect("seizes");
        ptrace::interrupt(tid).expect("interrupts");
        // The new program shows in /proc a moment before execve(2) reports it, and any stop takes
        // the interrupt with it.
        loop {
            match ptrace::wait(Whose::One(tid), true).expect("waits") {
                Waited::Stopped(_, Stop::Interrupted) => break,
                Waited::Stopped(_, Stop::Exec { .. }) => {
                    ptrace::cont(tid, 0).expect("resumes");
                    ptrace::interrupt(tid).expect("interrupts");
                }
                other => panic!("{other:?}"),
            }
        }
        Self(child, tid)
    }

    fn inject(&self) -> Stub {
        let mut maps = Vec::new();
        proc_maps::read(self.1, &mut Vec::new(), &mut maps).expect("reads maps");
        let at = vdso_syscall(self.1, &maps).expect("has a syscall");
        let pidfd = pidfd::open(self.1).expect("opens pidfd");
        Stub::inject(self.1, pidfd.as_fd(), &maps, at).expect("injects")
    }
}

impl Drop for Sleeper {
    fn drop(&mut self) {
        let _ = self.0.kill();
        let _ = self.0.wait();
    }
}

#[test]
fn a_batch_of_calls_runs_and_leaves_no_trace_in_the_registers() {
    let sleeper = Sleeper::stopped();
    let tid = sleeper.1;
    let before = ptrace::registers(tid).expect("registers");
    let stub = sleeper.inject();
    let mut calls = [
        Call::new(libc::SYS_getpid, &[]),
        Call::new(libc::SYS_dup, &[2]),
        Call::new(libc::SYS_close, &[]).chained().required(),
        Call::new(libc::SYS_close, &[9999]).required(),
        Call::new(libc::SYS_getpid, &[]),
    ];
    stub.run(tid, 3, &mut calls).expect("runs");
    assert_eq!(calls[0].result, i64::from(tid.0));
    assert!(calls[1].result >= 3);
    assert_eq!(calls[2].result, 0);
    assert_eq!(calls[3].result, -i64::from(libc::EBADF));
    assert!(calls[4].value("get pid").is_err());
    assert_eq!(ptrace::registers(tid).expect("registers"), before);
}

#[test]
fn a_write_is_seen_once_and_a_discard_is_seen_as_a_hole() {
    let sleeper = Sleeper::stopped();
    let tid = sleeper.1;
    let stub = sleeper.inject();
    let rw = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let mut calls = [
        Call::new(libc::SYS_userfaultfd, &[libc::O_CLOEXEC as u64]),
        Call::new(libc::SYS_mmap, &[0, 16 * 4096, rw, flags, u64::MAX, 0]),
    ];
    stub.run(tid, 0, &mut calls).expect("runs");
    let uffd = calls[0].value("create userfaultfd").expect("creates");
    let base = calls[1].value("map").expect("maps");
    let pidfd = pidfd::open(tid).expect("opens pidfd");
    let fd = pidfd::get_fd(pidfd.as_fd(), uffd as i32).expect("fetches");
    let tracker = WriteTracker::new(fd).expect("switches on");
    let mut map = Pagemap::open(tid).expect("opens pagemap");
    let populated = category::PRESENT | category::SWAPPED;
    let query = Query {
        any_of: populated,
        report: populated | category::WRITTEN,
        rearm: true,
        ..Query::default()
    };
    let end = base + 16 * 4096;
    let mut scan = |base| {
        let mut found = Vec::new();
        let how = map.scan(base, end, query, &mut found).expect("scans");
        (how, found.iter().map(|r| (r.start - base, r.end - base, r.categories)).collect())
    };
    assert_eq!(scan(base), (Scanned::NotTracked(base), vec![]));
    tracker.register(base, end).expect("registers");
    memory::write(tid, &[(base + 4096, 8192)], &[7; 8192]).expect("writes");
    let written = category::WRITTEN | category::PRESENT;
    assert_eq!(scan(base), (Scanned::Complete, vec![(4096, 12288, written)]));
    assert_eq!(scan(base), (Scanned::Complete, vec![(4096, 12288, category::PRESENT)]));
    memory::write(tid, &[(base + 8192, 8)], &[8; 8]).expect("writes");
    let discard = Call::new(libc::SYS_madvise, &[base + 4096, 4096, libc::MADV_DONTNEED as u64]);
    stub.run(tid, 0, &mut [discard]).expect("runs");
    assert_eq!(scan(base), (Scanned::Complete, vec![(8192, 12288, written)]));
}

#[test]
fn a_mark_left_from_an_ended_registration_hides_no_write() {
    let sleeper = Sleeper::stopped();
    let tid = sleeper.1;
    let stub = sleeper.inject();
    let rw = (libc::PROT_READ | libc::PROT_WRITE) as u64;
    let flags = (libc::MAP_PRIVATE | libc::MAP_ANONYMOUS) as u64;
    let mut calls = [
        Call::new(libc::SYS_userfaultfd, &[libc::O_CLOEXEC as u64]),
        Call::new(libc::SYS_mmap, &[0, 16 * 4096, rw, flags, u64::MAX, 0]),
    ];
    stub.run(tid, 0, &mut calls).expect("runs");
    let uffd = calls[0].value("create userfaultfd").expect("creates");
    let base = calls[1].value("map").expect("maps");
    let pidfd = pidfd::open(tid).expect("opens pidfd");
    let fd = pidfd::get_fd(pidfd.as_fd(), uffd as i32).expect("fetches");
    let tracker = WriteTracker::new(fd).expect("switches on");
    let mut map = Pagemap::open(tid).expect("opens pagemap");
    let report = category::PRESENT | category::WRITTEN;
    let query = Query { any_of: category::PRESENT, report, rearm: true, ..Query::default() };
    let mut scan = |start, end| {
        let mut found = Vec::new();
        let how = map.scan(start, end, query, &mut found).expect("scans");
        (how, found.iter().map(|r| (r.start - base, r.end - base, r.categories)).collect())
    };
    let write = |byte| memory::write(tid, &[(base, 4096)], &[byte; 4096]).expect("writes");
    let (hole, last, end) = (base + 4 * 4096, base + 12 * 4096, base + 16 * 4096);
    stub.run(tid, 0, &mut [Call::new(libc::SYS_munmap, &[hole, last - hole])]).expect("runs");
    tracker.register(base, hole).expect("registers");
    tracker.register(last, end).expect("registers");
    write(1);
    assert_eq!(scan(base, hole), (Scanned::Complete, vec![(0, 4096, report)]));
    // What moves here joins its neighbour, and both lose their registration, not their marks.
    let how = (libc::MREMAP_MAYMOVE | libc::MREMAP_FIXED) as u64;
    let mut moves = [Call::new(libc::SYS_mremap, &[last, end - last, end - last, how, hole])];
    stub.run(tid, 0, &mut moves).expect("runs");
    assert_eq!(moves[0].value("move").expect("moves"), hole);
    write(2);
    tracker.register(base, hole).expect("registers");
    tracker.unprotect(base, hole).expect("takes marks off");
    assert_eq!(scan(base, hole), (Scanned::Complete, vec![(0, 4096, report)]));
    write(3);
    assert_eq!(scan(base, hole), (Scanned::Complete, vec![(0, 4096, report)]));
}

/// Seizes and stops all threads of a program that has two.
fn two_threads() -> (Child, Vec<HostPid>) {
    let program = "import threading, time\n\
                   threading.Thread(target=time.sleep, args=(1000,)).start()\n\
                   time.sleep(1000)";
    let child = Command::new("python3").args(["-c", program]).spawn().expect("spawns");
    let tasks = format!("/proc/{}/task", child.id());
    let threads = || -> Vec<HostPid> {
        let names = std::fs::read_dir(&tasks).expect("lists").map(|task| task.expect("is one"));
        let number = |name: &std::ffi::OsStr| name.to_str().and_then(|name| name.parse().ok());
        names.map(|task| HostPid(number(&task.file_name()).expect("a number"))).collect()
    };
    while threads().len() < 2 {
        std::thread::sleep(Duration::from_millis(5));
    }
    for tid in threads() {
        ptrace::seize(tid).expect("seizes");
        ptrace::interrupt(tid).expect("interrupts");
        assert!(matches!(ptrace::wait(Whose::One(tid), true), Ok(Waited::Stopped(..))));
    }
    (child, threads())
}

/// The leader cannot be waited for before the other thread is, for which nobody waits meanwhile.
#[test]
fn a_process_that_is_killed_while_it_runs_calls_is_not_waited_for() {
    let (done, is_done) = std::sync::mpsc::channel();
    std::thread::spawn(move || {
        let (mut child, threads) = two_threads();
        let leader = HostPid(child.id() as i32);
        let mut maps = Vec::new();
        proc_maps::read(leader, &mut Vec::new(), &mut maps).expect("reads maps");
        let at = vdso_syscall(leader, &maps).expect("has a syscall");
        let pidfd = pidfd::open(leader).expect("opens pidfd");
        let stub = Stub::inject(leader, pidfd.as_fd(), &maps, at).expect("injects");
        let mut calls = [Call::new(libc::SYS_pause, &[])];
        let frame = ptrace::registers(leader).expect("registers");
        stub.start(leader, 0, &frame, &calls).expect("starts");
        child.kill().expect("kills");
        let error = stub.finish(leader, 0, &mut calls).expect_err("is dead");
        assert!(error.is_died(), "{error}");
        for tid in threads.into_iter().filter(|tid| *tid != leader) {
            assert!(matches!(ptrace::wait(Whose::One(tid), true), Ok(Waited::Ended(..))));
        }
        assert!(matches!(ptrace::wait(Whose::One(leader), true), Ok(Waited::Ended(..))));
        done.send(()).expect("is waited for");
    });
    is_done.recv_timeout(Duration::from_secs(30)).expect("it ends");
}
