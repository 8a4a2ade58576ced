//! What a socket costs: µs of processor time per capture and per restore, by kind. Needs root.
//!
//! `cargo run --release -p hotspare-process --example socket_cost [SOCKETS]`

use std::error::Error;
use std::fs::File;
use std::net::{TcpListener, TcpStream};
use std::os::fd::{AsFd, AsRawFd, OwnedFd};
use std::os::unix::fs::MetadataExt;
use std::os::unix::net::UnixStream;

use hotspare_image::objects::{FileId, FileOwner, OpenFile};
use hotspare_image::tree::{ClockReading, GuestPid, HostPath};
use hotspare_process::objects::ipc::IpcCapture;
use hotspare_process::objects::restore::{NoParts, RestoreContext, own_descriptors};
use hotspare_process::objects::rules::FileRules;
use hotspare_process::objects::socket::{SocketCapture, go_live, restore};
use hotspare_process::objects::unix::{GuestView, Made};
use nix::sched::{CloneFlags, unshare};

type Outcome<T> = Result<T, Box<dyn Error + Send + Sync>>;

/// A stopwatch that stands while others have the processor.
struct Instant(f64);

impl Instant {
    fn now() -> Self {
        let now = nix::time::clock_gettime(nix::time::ClockId::CLOCK_THREAD_CPUTIME_ID);
        let now = now.expect("every thread has a clock");
        Self(now.tv_sec() as f64 * 1e6 + now.tv_nsec() as f64 / 1e3)
    }
    fn elapsed_us(&self) -> f64 {
        Self::now().0 - self.0
    }
}

struct View;

impl GuestView for View {
    fn guest_pid(&self, host: i32) -> GuestPid {
        GuestPid(host)
    }
    fn root(&self) -> std::path::PathBuf {
        "/".into()
    }
    fn working_directories(&self) -> Vec<HostPath> {
        Vec::new()
    }
}

fn in_new_namespaces<T: Send>(work: impl FnOnce() -> Outcome<T> + Send) -> Outcome<T> {
    std::thread::scope(|scope| {
        let thread = scope.spawn(|| {
            unshare(CloneFlags::CLONE_NEWNET | CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_FS)?;
            for arguments in [
                "link set lo up",
                "address add 10.9.9.9/32 dev lo",
                "address add 10.8.8.8/32 dev lo",
            ] {
                std::process::Command::new("ip").args(arguments.split(' ')).status()?;
            }
            work()
        });
        thread.join().map_err(|_| "a thread panicked")?
    })
}

fn inode(fd: &OwnedFd) -> Outcome<u64> {
    Ok(std::fs::metadata(format!("/proc/self/fd/{}", fd.as_raw_fd()))?.ino())
}

/// Captures some epochs, prints each one's cost, returns the last.
fn capture(name: &str, sockets: &[OwnedFd]) -> Outcome<Vec<OpenFile>> {
    let net = File::open("/proc/thread-self/ns/net")?;
    let mut capture = SocketCapture::open(net.as_fd())?;
    let inodes = sockets.iter().map(inode).collect::<Outcome<Vec<_>>>()?;
    let mut files = Vec::new();
    for epoch in 1..=40 {
        let start = Instant::now();
        capture.begin_epoch();
        files.clear();
        for (number, (socket, inode)) in sockets.iter().zip(&inodes).enumerate() {
            let in_flight = &mut |_| Ok(FileId(0));
            let object = capture.capture(socket.as_fd(), *inode, &View, in_flight)?;
            let (id, owner) = (FileId(number as u32), FileOwner::default());
            files.push(OpenFile { id, flags: 2, owner, object });
        }
        if [1, 2, 3, 40].contains(&epoch) {
            let each = start.elapsed_us() / sockets.len() as f64;
            println!("{name}: capture, epoch {epoch}: {each:.1} µs each");
        }
    }
    Ok(files)
}

fn restore_all(name: &str, files: &[OpenFile]) -> Outcome<()> {
    let mut made = Made::new();
    let each = |start: Instant| start.elapsed_us() / files.len() as f64;
    let (rules, clocks) = (FileRules::default(), ClockReading::default());
    let context = RestoreContext::new(&NoParts, &rules, clocks, 0, own_descriptors()?);
    let start = Instant::now();
    restore(files, &context, Default::default(), &mut made, &|guest| Some(guest.0))?;
    println!("{name}: restore: {:.1} µs each", each(start));
    let start = Instant::now();
    go_live(files, &made)?;
    println!("{name}: go live: {:.1} µs each", each(start));
    Ok(())
}

fn main() -> Outcome<()> {
    let count: usize = std::env::args().nth(1).map_or(Ok(1000), |text| text.parse())?;
    let files = in_new_namespaces(|| {
        let listener = TcpListener::bind("10.9.9.9:80")?;
        let mut ends = Vec::new();
        let mut accepted: Vec<OwnedFd> = Vec::new();
        for _ in 0..count {
            ends.push(TcpStream::connect("10.9.9.9:80")?);
            accepted.push(listener.accept()?.0.into());
        }
        capture("TCP, idle", &accepted)
    })?;
    in_new_namespaces(|| restore_all("TCP, idle", &files))?;
    let files = in_new_namespaces(|| {
        let mut ends: Vec<OwnedFd> = Vec::new();
        for _ in 0..count / 2 {
            let (a, b) = UnixStream::pair()?;
            ends.extend([a.into(), b.into()]);
        }
        capture("UNIX pairs", &ends)
    })?;
    in_new_namespaces(|| restore_all("UNIX pairs", &files))?;
    in_new_namespaces(|| {
        let mut capture = IpcCapture::open(File::open("/proc/thread-self/ns/ipc")?.into())?;
        let start = Instant::now();
        for _ in 0..100 {
            capture.capture(&GuestPid)?;
        }
        println!("IPC, none: {:.1} µs an epoch", start.elapsed_us() / 100.0);
        Ok(())
    })
}
