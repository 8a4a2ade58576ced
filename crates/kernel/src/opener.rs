//! Opens files of our own FUSE mounts, and names sockets there, on a thread that does not hold
//! `/dev/fuse`.
//!
//! A thread inside open(2) or a lookup waits for an answer that only this process can give. If the
//! process is killed in that instant, the thread stays until the kernel gives up the mount, which
//! it does when `/dev/fuse` is closed; and a descriptor table is closed by the last thread that
//! uses it. So whoever waits must not be the one that keeps the table open: the thread here has a
//! table of its own, with one socket in it, through which the opened files come back.

use std::fs::File;
use std::io;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::path::{Path, PathBuf};
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Mutex, MutexGuard, PoisonError};

use nix::fcntl::{OFlag, open};
use nix::sys::socket::{AddressFamily, SockFlag, SockType, socketpair};
use nix::sys::stat::Mode;

use crate::descriptor::leave_table;
use crate::socket::{self, Outgoing};

/// What to open or to do.
enum Wish {
    Path(PathBuf, i32),
    /// A file without a name, below the root of its mount.
    Inode(PathBuf, u64, i32),
    /// Something to do with the file that comes over the socket.
    Work(Work),
}

type Work = Box<dyn FnOnce(BorrowedFd<'_>) + Send>;

/// Opens files for others, in the mount namespace of the thread that started it. Its thread ends
/// when this is dropped.
#[derive(Debug)]
pub struct Opener(Mutex<Ends>);

#[derive(Debug)]
struct Ends {
    wishes: Sender<Wish>,
    answers: Receiver<io::Result<()>>,
    files: OwnedFd,
}

impl Opener {
    /// Starts the thread, in the namespaces of the calling one.
    pub fn start() -> io::Result<Opener> {
        let (ours, theirs) =
            socketpair(AddressFamily::Unix, SockType::SeqPacket, None, SockFlag::SOCK_CLOEXEC)?;
        let (wishes, wished) = channel();
        let (answer, answers) = channel();
        let (started, starts) = channel();
        std::thread::Builder::new().name("opener".into()).spawn(move || {
            let own = leave_table(theirs.as_fd())
                .map_err(io::Error::other)
                .and_then(|()| theirs.as_fd().try_clone_to_owned());
            // `theirs` goes back: it is to be closed in the table that it was opened in.
            match own {
                Ok(own) => {
                    let _ = started.send((theirs, Ok(())));
                    serve(own.as_fd(), &wished, &answer);
                }
                Err(error) => drop(started.send((theirs, Err(error)))),
            }
        })?;
        let (theirs, left) = starts.recv().map_err(io::Error::other)?;
        drop(theirs);
        left?;
        Ok(Opener(Mutex::new(Ends { wishes, answers, files: ours })))
    }

    /// open(2) with `flags`.
    pub fn open(&self, path: &Path, flags: i32) -> io::Result<OwnedFd> {
        self.ask(Wish::Path(path.to_owned(), flags))
    }

    /// Opens inode `inode` of the FUSE mount with this root.
    pub fn open_inode(&self, root: &Path, inode: u64, flags: i32) -> io::Result<OwnedFd> {
        self.ask(Wish::Inode(root.to_owned(), inode, flags))
    }

    /// Does `work` with `file` on the thread, which has a duplicate of it and no other file. The
    /// file must not be one whose closing waits for us.
    pub fn run<T: Send + 'static>(
        &self,
        file: BorrowedFd<'_>,
        work: impl FnOnce(BorrowedFd<'_>) -> T + Send + 'static,
    ) -> io::Result<T> {
        let (done, result) = channel();
        let work: Work = Box::new(move |file| drop(done.send(work(file))));
        let ends = self.ends();
        give(ends.files.as_fd(), file)?;
        ends.wishes.send(Wish::Work(work)).map_err(|_| dead())?;
        ends.answers.recv().map_err(|_| dead())??;
        result.recv().map_err(|_| dead())
    }

    fn ends(&self) -> MutexGuard<'_, Ends> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn ask(&self, wish: Wish) -> io::Result<OwnedFd> {
        let ends = self.ends();
        ends.wishes.send(wish).map_err(|_| dead())?;
        ends.answers.recv().map_err(|_| dead())??;
        take(ends.files.as_fd())
    }
}

fn dead() -> io::Error {
    io::Error::other("the thread that opens files has died")
}

fn give(way: BorrowedFd<'_>, file: BorrowedFd<'_>) -> io::Result<()> {
    let message = Outgoing { bytes: &[0], files: &[file], ..Outgoing::default() };
    socket::send_message(way, message).map(drop).map_err(io::Error::other)
}

fn take(way: BorrowedFd<'_>) -> io::Result<OwnedFd> {
    let message = socket::receive_message(way, 1, libc::MSG_DONTWAIT).map_err(io::Error::other)?;
    message.and_then(|message| message.files.into_iter().next()).ok_or_else(dead)
}

fn serve(files: BorrowedFd<'_>, wishes: &Receiver<Wish>, answer: &Sender<io::Result<()>>) {
    for wish in wishes {
        if answer.send(fulfil(wish, files)).is_err() {
            return;
        }
    }
}

fn fulfil(wish: Wish, files: BorrowedFd<'_>) -> io::Result<()> {
    let opened = match wish {
        Wish::Path(path, flags) => {
            let flags = OFlag::from_bits_retain(flags | libc::O_CLOEXEC);
            open(&path, flags, Mode::empty())?
        }
        Wish::Inode(root, inode, flags) => {
            let root = File::open(root)?;
            crate::open_fuse_inode(root.as_fd(), inode, flags)?
        }
        Wish::Work(work) => {
            work(take(files)?.as_fd());
            return Ok(());
        }
    };
    give(files, opened.as_fd())
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::io::Read;

    #[test]
    fn files_come_from_a_thread_that_has_none_of_our_descriptors() {
        let path = Path::new("/proc/self/comm");
        let content = std::fs::read_to_string("/proc/self/comm").unwrap();
        let opener = Opener::start().unwrap();
        for _ in 0..1000 {
            let mut said = String::new();
            let file = opener.open(path, libc::O_RDONLY).unwrap();
            File::from(file).read_to_string(&mut said).unwrap();
            assert_eq!(said, content);
        }
        let error = opener.open(Path::new("/proc/none"), libc::O_RDONLY).unwrap_err();
        assert_eq!(error.raw_os_error(), Some(libc::ENOENT));
        // What it sees of itself: standard streams, its socket, and the directory it reads.
        let tasks = std::fs::read_dir("/proc/self/task").unwrap();
        let opener_task = tasks.flatten().find(|task| {
            std::fs::read_to_string(task.path().join("comm")).unwrap_or_default() == "opener\n"
        });
        let table = opener_task.unwrap().path().join("fd");
        let open: Vec<_> = std::fs::read_dir(table).unwrap().flatten().collect();
        assert!(open.len() <= 5, "{open:?}");
    }

    #[test]
    fn work_is_done_with_a_file_that_is_all_the_thread_has() {
        let name = format!("hotspare-opener-{}", std::process::id());
        let path = std::env::temp_dir().join(name);
        let opener = Opener::start().unwrap();
        for _ in 0..100 {
            let socket = socket::create(libc::AF_UNIX, libc::SOCK_STREAM, 0).unwrap();
            let mut name = (libc::AF_UNIX as u16).to_ne_bytes().to_vec();
            name.extend_from_slice(path.as_os_str().as_encoded_bytes());
            let bound = opener.run(socket.as_fd(), move |socket| socket::bind(socket, &name));
            bound.unwrap().unwrap();
            std::fs::remove_file(&path).expect("the thread bound our socket");
            drop(opener.open(Path::new("/proc/self/comm"), libc::O_RDONLY).unwrap());
        }
    }
}
