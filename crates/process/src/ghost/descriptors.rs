//! Descriptors into the ghost: each taken from us by number (pidfd_getfd(2)), then put where the
//! guest has it.

use std::collections::BTreeSet;
use std::os::fd::AsRawFd;

use hotspare_image::objects::Descriptor;
use hotspare_kernel::KernelError;

use super::RestoredFiles;
use super::body::{Body, TOOLS};
use super::error::{GhostError, GhostResult};
use crate::objects::remote_step::RemoteStep;

/// Descriptors placed in one batch.
const CHUNK: usize = 60;

impl Body {
    /// Gives the process its descriptor table. Its tools go.
    pub(super) fn place_descriptors(
        &self,
        table: &[Descriptor],
        files: &RestoredFiles,
    ) -> GhostResult<()> {
        let mut table = table.to_vec();
        table.sort_by_key(|descriptor| descriptor.fd);
        let tool = self.clear_way(&table)?;
        let mut taken = BTreeSet::from([tool]);
        for chunk in table.chunks(CHUNK) {
            let mut batch = self.batch();
            let mut expected = Vec::new();
            for descriptor in chunk {
                let file = files.get(&descriptor.file).ok_or_else(|| {
                    GhostError::Image(format!("descriptor {} of no file", descriptor.fd))
                })?;
                let free = (0..).find(|number| !taken.contains(number)).unwrap_or(0);
                expected.push(Some(i64::from(free)));
                let source = file.as_raw_fd() as u64;
                batch.must("take descriptor", libc::SYS_pidfd_getfd, &[tool as u64, source, 0]);
                let (free, number) = (free as u64, descriptor.fd as u64);
                if free != number {
                    let flags = if descriptor.close_on_exec { libc::O_CLOEXEC } else { 0 };
                    let arguments = [free, number, flags as u64];
                    batch.must("place descriptor", libc::SYS_dup3, &arguments);
                    batch.must("close descriptor", libc::SYS_close, &[free]);
                    expected.extend([None, None]);
                } else if !descriptor.close_on_exec {
                    let arguments = [number, libc::F_SETFD as u64, 0];
                    batch.must("keep descriptor open", libc::SYS_fcntl, &arguments);
                    expected.push(None);
                }
                taken.insert(descriptor.fd);
            }
            for (result, expected) in batch.run()?.into_iter().zip(expected) {
                if expected.is_some_and(|expected| expected != result) {
                    let what = format!("descriptor {result} instead of {expected:?}");
                    return Err(KernelError::Unexpected(what).into());
                }
            }
        }
        self.batch().ask("close tool", libc::SYS_close, &[tool as u64])?;
        Ok(())
    }

    /// Makes the calls that only the process itself can make on its descriptors.
    pub(super) fn take_steps(&self, steps: &[&RemoteStep]) -> GhostResult<()> {
        let mut batch = self.batch();
        for step in steps {
            batch.room(64, 1)?;
            let payload = batch.data(&step.payload());
            let call = step.call(payload);
            batch.must(step.verb(), call.number, &call.arguments);
        }
        batch.run()?;
        Ok(())
    }

    /// Moves the pidfd of ours out of the table's way and closes the idle program.
    fn clear_way(&self, table: &[Descriptor]) -> GhostResult<i32> {
        let mut batch = self.batch();
        batch.must("close idle program", libc::SYS_close, &[TOOLS[1] as u64]);
        let last = table.last().map_or(0, |descriptor| descriptor.fd);
        let in_way = table.iter().any(|descriptor| descriptor.fd == TOOLS[0]);
        let tool = if in_way { last + 1 } else { TOOLS[0] };
        if in_way {
            batch.must("move tool", libc::SYS_dup3, &[TOOLS[0] as u64, tool as u64, 0]);
            batch.must("close old tool", libc::SYS_close, &[TOOLS[0] as u64]);
        }
        batch.run()?;
        Ok(tool)
    }
}
