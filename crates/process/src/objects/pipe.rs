//! Pipes and FIFOs.
//!
//! Every end is an open file description of its own; the bytes belong to the pipe, which is known
//! by its inode number. tee(2) copies them into a pipe of ours without taking them from the guest.

use std::collections::BTreeMap;
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};

use hotspare_image::objects::{FileId, PipeContents, PipeEnd};
use hotspare_image::tree::HostPath;
use hotspare_kernel::{KernelError, descriptor};

use super::class::{Class, Known};
use super::error::{ObjectError, ObjectResult};
use super::fdinfo::Header;
use super::restore::{RestoreContext, set_flags};
use super::rules::{FileRules, Standing};

/// Whether an end with `flags` can be read from.
pub fn reads(flags: u32) -> bool {
    flags & libc::O_ACCMODE as u32 != libc::O_WRONLY as u32
}

fn writes(flags: u32) -> bool {
    flags & libc::O_ACCMODE as u32 != libc::O_RDONLY as u32
}

/// The image of one end, without the pipe's contents.
pub fn capture(
    known: &Known,
    header: &Header,
    end: BorrowedFd<'_>,
    rules: &FileRules,
) -> ObjectResult<PipeEnd> {
    // A FIFO that has lost its name is as good as a pipe that never had one.
    let named = known.class == Class::Fifo && !known.deleted;
    let fifo = named.then(|| HostPath(known.path.clone()));
    if let Some(path) = &fifo
        && rules.standing(&path.0) == Standing::Compared
    {
        let reason = "a FIFO must lie in a directory named with --files replicate:DIR or \
            --files shared:DIR";
        return Err(ObjectError::refused(&path.0, reason));
    }
    let capacity_bytes = descriptor::pipe_capacity(end)?;
    Ok(PipeEnd { pipe: header.inode, fifo, capacity_bytes, contents: None })
}

/// A pipe of ours that copies go through.
#[derive(Debug, Default)]
pub struct Scratch {
    ends: Option<(OwnedFd, OwnedFd, u32)>,
}

impl Scratch {
    /// A scratch pipe, empty, with room for one of `capacity` bytes.
    fn ready(&mut self, capacity: u32) -> ObjectResult<(BorrowedFd<'_>, BorrowedFd<'_>)> {
        let (read, write, has) = match self.ends.take() {
            Some(ends) => self.ends.insert(ends),
            None => {
                let (read, write) = descriptor::pipe(libc::O_NONBLOCK)?;
                let has = descriptor::pipe_capacity(read.as_fd())?;
                self.ends.insert((read, write, has))
            }
        };
        if *has < capacity {
            *has = descriptor::set_pipe_capacity(read.as_fd(), capacity)?;
        }
        let (read, write) = (&*read, &*write);
        Ok((read.as_fd(), write.as_fd()))
    }
}

/// Copies what is in the pipe that `end`, open for reading, belongs to.
pub fn contents(
    end: BorrowedFd<'_>,
    capacity: u32,
    packets: bool,
    scratch: &mut Scratch,
) -> ObjectResult<Option<PipeContents>> {
    let unread = descriptor::readable_bytes(end)?;
    if unread == 0 {
        return Ok(None);
    }
    let copied = copy(end, capacity, packets, unread, scratch);
    if copied.is_err() {
        // What may be left in the scratch pipe must not appear in another's copy.
        *scratch = Scratch::default();
    }
    copied.map(Some)
}

fn copy(
    end: BorrowedFd<'_>,
    capacity: u32,
    packets: bool,
    unread: usize,
    scratch: &mut Scratch,
) -> ObjectResult<PipeContents> {
    let (read, write) = scratch.ready(capacity)?;
    let teed = descriptor::tee(end, write, unread)?;
    let mut contents = PipeContents { bytes: vec![0; teed], packets: Vec::new() };
    let mut at = 0;
    while at < teed {
        let bytes = nix::unistd::read(read, &mut contents.bytes[at..])
            .map_err(|errno| KernelError::from_errno("read pipe copy", errno as i32))?;
        if bytes == 0 {
            break;
        }
        if packets {
            contents.packets.push(bytes as u32);
        }
        at += bytes;
    }
    if teed != unread || at != teed {
        let what = format!("copied {at} of {teed} of {unread} bytes of a pipe");
        return Err(KernelError::Unexpected(what).into());
    }
    Ok(contents)
}

/// One end to make: its name, its flags, its image.
pub type End<'a> = (FileId, u32, &'a PipeEnd);

/// Makes all `ends` of one pipe and fills it.
pub fn restore(
    ends: &[End<'_>],
    context: &RestoreContext<'_>,
) -> ObjectResult<BTreeMap<FileId, OwnedFd>> {
    let Some((_, _, first)) = ends.first() else { return Ok(BTreeMap::new()) };
    // Until all ends are there, both kinds must exist: or writes and opens would fail or block.
    let (read, write) = match &first.fifo {
        Some(path) => {
            let anchor = context.open(path, (libc::O_RDWR | libc::O_NONBLOCK) as u32)?;
            let other = context.reopen(anchor.as_fd(), (libc::O_RDWR | libc::O_NONBLOCK) as u32)?;
            (anchor, other)
        }
        None => descriptor::pipe(libc::O_NONBLOCK)?,
    };
    if descriptor::pipe_capacity(read.as_fd())? != first.capacity_bytes {
        descriptor::set_pipe_capacity(read.as_fd(), first.capacity_bytes)?;
    }
    for (_, _, end) in ends {
        if let Some(contents) = &end.contents {
            fill(&write, contents)?;
        }
    }
    let (mut read, mut write) = (Some(read), Some(write));
    let mut made = BTreeMap::new();
    for (id, flags, _) in ends {
        // The ends of a new unnamed pipe are used as they are; all others are opened.
        let unused = match (reads(*flags), writes(*flags)) {
            _ if first.fifo.is_some() => None,
            (true, false) => read.take(),
            (false, true) => write.take(),
            (true, true) | (false, false) => None,
        };
        let file = match unused {
            Some(end) => end,
            None => {
                let anchor = read.as_ref().or(write.as_ref()).or(made.values().next());
                let anchor = anchor.expect("one end exists").as_fd();
                let access = flags & libc::O_ACCMODE as u32;
                context.reopen(anchor, access | libc::O_NONBLOCK as u32)?
            }
        };
        set_flags(&file, *flags)?;
        made.insert(*id, file);
    }
    Ok(made)
}

fn fill(write: &OwnedFd, contents: &PipeContents) -> ObjectResult<()> {
    let whole = [contents.bytes.len() as u32];
    let packets: &[u32] = if contents.packets.is_empty() { &whole } else { &contents.packets };
    if !contents.packets.is_empty() {
        set_flags(write, (libc::O_DIRECT | libc::O_NONBLOCK) as u32)?;
    }
    let mut rest = &contents.bytes[..];
    for &length in packets {
        let packet = rest.get(..length as usize).ok_or_else(|| {
            ObjectError::Image("packets of a pipe are longer than its bytes".to_owned())
        })?;
        rest = &rest[length as usize..];
        let mut left = packet;
        while !left.is_empty() {
            let written = nix::unistd::write(write, left)
                .map_err(|errno| KernelError::from_errno("fill pipe", errno as i32))?;
            left = &left[written..];
        }
    }
    set_flags(write, libc::O_NONBLOCK as u32)
}
