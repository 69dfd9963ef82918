// A program without a C library: nothing can be put before its calls. usage: static DIR
package main

import (
	"bufio"
	"fmt"
	"io"
	"os"
	"path/filepath"
	"sync"
)

func must(err error) {
	if err != nil {
		fmt.Println("failed:", err)
		os.Exit(1)
	}
}

func main() {
	dir := os.Args[1]
	var all sync.WaitGroup
	for rank := 0; rank < 4; rank++ {
		all.Add(1)
		go func(rank int) {
			defer all.Done()
			file, err := os.Create(filepath.Join(dir, fmt.Sprintf("rank%d.tmp", rank)))
			must(err)
			out := bufio.NewWriterSize(file, 70000)
			for i := 0; i < 100000; i++ {
				fmt.Fprintf(out, "%d %d\n", rank, i)
			}
			must(out.Flush())
			_, err = file.WriteAt([]byte("first"), 0)
			must(err)
			must(file.Sync())
			must(file.Close())
			must(os.Rename(file.Name(), filepath.Join(dir, fmt.Sprintf("rank%d", rank))))
		}(rank)
	}
	all.Wait()
	from, err := os.Open(filepath.Join(dir, "rank0"))
	must(err)
	to, err := os.Create(filepath.Join(dir, "copy"))
	must(err)
	copied, err := io.Copy(to, from)
	must(err)
	must(to.Truncate(copied / 2))
	must(to.Close())
	info, err := os.Stat(to.Name())
	must(err)
	fmt.Println(copied, info.Size())
}
