//! What users do in a directory, for shells and Python: the same output and files are expected wherever that is.

/// bash: redirections, descriptors of its own, pipes and the usual programs. The directory is the current one.
pub const SHELL: &str = r#"
        echo one > file; echo two >> file; printf '%s\n' three four >> file
        exec 3> third; echo a >&3; (echo b >&3); ls / > /dev/null; echo c >&3; exec 3>&-
        exec 4<> both; echo 123456789 >&4; exec 4>&-; cat < both; cat both > copy
        for i in $(seq 200); do echo line $i; done > lines; wc -l < lines
        head -c 300000 /dev/zero | tr '\0' x > many; dd if=many of=some bs=777 count=100 status=none
        sort -r lines -o lines; sed -i s/line/LINE/ lines; cp lines lines2; cat lines lines2 > both2
        seq 100000 | tee numbers | md5sum; gzip -k numbers; zcat numbers.gz | cmp - numbers
        env -i /bin/echo nothing > env; ( echo x; exec /bin/echo y ) > braces
        ( exec 5> sub; for i in 1 2 3; do echo $i >&5; /bin/echo $i >&5; done ) ; cat sub; rm numbers.gz"#;

/// Python: files of all kinds, programs that are started, forks. The directory is the first argument.
pub const PYTHON: &str = r#"
import os, subprocess, sys, multiprocessing, tempfile, shutil
os.chdir(sys.argv[1])
with open('out', 'wb') as f:
    f.write(b'before\n'); f.flush()
    print(subprocess.run(['echo', 'child'], stdout=f).returncode)
    f.write(b'after\n')
    for i in range(3000): f.write(b'%d ' % i * 100)
    print(f.tell())
print(subprocess.check_output('cat out | wc -c', shell=True))
with open('text', 'w+') as f:
    for i in range(20000): print('line', i, file=f)
    f.seek(100); f.write('SEEK'); f.seek(0); print(len(f.read()))
    f.truncate(5000)
fd = os.open('raw', os.O_CREAT | os.O_RDWR)
for i in range(1000): os.write(fd, b'x' * i)
os.writev(fd, [b'a' * 10000, b'b' * 20000]); os.pwrite(fd, b'P', 77)
print(os.lseek(fd, 0, os.SEEK_CUR), len(os.pread(fd, 1 << 20, 0)), os.fstat(fd).st_size)
def child(name):
    with open(name, 'wb', buffering=0) as f:
        for i in range(500): f.write(b'%d' % i)
with multiprocessing.get_context('fork').Pool(2) as pool: pool.map(child, ['c1', 'c2', 'c3'])
with tempfile.NamedTemporaryFile(dir='.', delete=False) as f: f.write(b'temporary' * 10000); name = f.name
os.replace(name, 'replaced'); shutil.copyfile('replaced', 'copied'); print(open('copied', 'rb').read()[:9])
os.fchmod(fd, 0o600); os.chmod('replaced', 0o644); print(sorted(os.listdir('.')))
p = subprocess.Popen(['tee', 'teed'], stdin=subprocess.PIPE, stdout=open('teed2', 'wb'))
p.communicate(b'data' * 50000); print(p.returncode)
"#;

/// bash: a tree is packed, unpacked and compared.
pub const TAR: &str =
    "mkdir tree; cd tree; mkdir -p a/b; for i in $(seq 60); do head -c ${i}777 /dev/zero > a/b/$i; done
        ln a/b/1 hard; ln -s a/b/2 soft; cd ..; tar -cf all.tar --mtime=2001-01-01 --owner=0 --sort=name tree
        mkdir again; tar -C again -xf all.tar; diff -r tree again/tree; tar -tf all.tar | wc -l";

/// bash: three processes fill a database at once, in each of the journal modes `$MODES`; rows are what remains.
pub const SQLITE: &str = r#"
        for mode in $MODES; do
            sqlite3 $mode.db "PRAGMA journal_mode=$mode; CREATE TABLE t(a INTEGER PRIMARY KEY, b TEXT);" > /dev/null
            for part in 1 2 3; do (
                for i in $(seq 20); do sqlite3 -cmd '.timeout 60000' $mode.db "INSERT INTO t(b) VALUES('$part $i')"; done
            ) & done; wait
            sqlite3 $mode.db "BEGIN; DELETE FROM t WHERE a % 3 = 0; ROLLBACK; SELECT count(*) FROM t; PRAGMA integrity_check"
            sqlite3 $mode.db "SELECT b FROM t ORDER BY b" > $mode.rows; rm -f $mode.db*
        done"#;

/// Node: its library makes some system calls by number. The directory is the first argument.
pub const NODE: &str = r#"
const fs = require('fs'), path = require('path'), assert = require('assert'); process.chdir(process.argv[1]);
const data = Buffer.alloc(300000); for (let i = 0; i < data.length; i++) data[i] = i * 7919 >> 5;
const same = (name, expected) => assert(fs.readFileSync(name).equals(expected), name);
fs.writeFileSync('sync', data); console.log(fs.statSync('sync').size, fs.lstatSync('sync').size); same('sync', data);
fs.appendFileSync('sync', data); same('sync', Buffer.concat([data, data]));
fs.copyFileSync('sync', 'copy'); same('copy', Buffer.concat([data, data])); fs.truncateSync('copy', 1234);
const fd = fs.openSync('descriptor', 'w+'); fs.writevSync(fd, [data, data.subarray(0, 10)]); fs.writeSync(fd, 'at', 5);
console.log(fs.fstatSync(fd).size, fs.readSync(fd, Buffer.alloc(100), 0, 100, 0)); fs.ftruncateSync(fd, 100); fs.closeSync(fd);
(async () => {
  const big = Buffer.concat(Array(10).fill(data)); await fs.promises.writeFile('promised', big); same('promised', big);
  await fs.promises.copyFile('promised', 'promised2'); console.log((await fs.promises.stat('promised2')).size);
  const to = fs.createWriteStream('streamed');
  fs.createReadStream('promised').pipe(to); await new Promise(done => to.on('finish', done)); same('streamed', big);
  const file = await fs.promises.open('handle', 'a+'); for (let i = 0; i < 5; i++) await file.write(`line ${i}\n`);
  console.log((await file.stat()).size, String(await file.readFile())); await file.close();
  fs.renameSync('handle', 'renamed'); fs.unlinkSync('promised2'); console.log(fs.readdirSync('.').sort());
})();
"#;
